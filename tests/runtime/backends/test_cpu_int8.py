"""Linears with inputs in eight bits on a CPU: bits of the reference, in any company and chunk."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from lowbit.formats.activation_modes import Inputs
from lowbit.formats.activations import (
    activation_group,
    grouped_product_ref,
    quantize_activations,
    whole_product_ref,
)
from lowbit.formats.layout.packing import unpack
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.backends import cpu, cpu_int8
from lowbit.runtime.backends.cpu_linear import linear, prepare, prepared_bytes
from lowbit.runtime.weights.linear import DenseLinear, PackedLinear
from tests.lanes import in_commands
from tests.runtime.backends.test_cpu_linear import packed

EPS = 1e-6
DTYPES = [torch.bfloat16, torch.float32]
WEIGHTS = [
    packed(24, 96, 3, 32),
    packed(80, 576, 4, 64),
    packed(64, 512, 2, 256),
    packed(48, 512, 8, 128, torch.float16),
    packed(40, 576, 8, 576),  # one scale a row, and a last group of 64
    packed(32, 96, 4, 48, torch.float32),
]
IDS = [f"INT{w.bits}-K{w.K}-G{w.group_size}" for w in WEIGHTS]


def inputs(M: int, K: int, dtype: torch.dtype) -> Tensor:
    """Tokens of different sizes, one of them zeros."""
    generator = torch.Generator().manual_seed(M)
    x = torch.randn(M, K, generator=generator) * torch.logspace(-3, 3, M)[:, None]
    if M > 1:
        x[M // 2] = 0
    return x.to(dtype)


def reference(x: Tensor, w: PackedLinear) -> Tensor:
    q, s = quantize_activations(x, activation_group(w.group_size, w.K))
    return grouped_product_ref(q, s, unpack(w.codes, w.bits, w.K), w.scales)


def whole_reference(x: Tensor, w: PackedLinear) -> Tensor:
    q, s = quantize_activations(x, w.K)
    return whole_product_ref(q, s, unpack(w.codes, w.bits, w.K), w.scales, w.bits)


@pytest.fixture(params=[True, False], ids=["pieces", "whole"])
def in_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply some rows and groups at a time, the last of them fewer, or all at once."""
    if request.param:
        monkeypatch.setattr(cpu_int8, "LEAST_ROWS", 7)
        monkeypatch.setattr(cpu_int8, "WIDE_CODES", 7 * 128 * 2)
        monkeypatch.setattr(cpu_int8, "WIDE_SUMS", 140)


@in_commands(
    "pieces-*-torch.float32-1",
    "pieces-INT4-*-torch.float32-70",
    "whole-*-torch.bfloat16-1",
    "whole-*-torch.float32-70",
)
@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("M", [1, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w", WEIGHTS, ids=IDS)
def test_the_product_is_the_reference(w: PackedLinear, dtype: torch.dtype, M: int) -> None:
    x, made = inputs(M, w.K, dtype), prepare(w, dtype, "int8")
    gain = 1 + 0.1 * torch.randn(w.K, generator=torch.Generator().manual_seed(1))
    residual = inputs(M, w.N, dtype)
    plain = reference(x, w)
    assert torch.equal(linear(x, made), plain)
    assert torch.equal(cpu.product(x, made), plain.to(dtype))
    assert torch.equal(cpu.product(x, made, added=residual), (residual + plain).to(dtype))
    factor = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    for norm in (gain, gain.to(dtype)):
        normed = factor * reference((x.float() * norm.float()).to(dtype), w)
        assert torch.equal(cpu.product(x, made, norm=norm, eps=EPS), normed.to(dtype))
        gate, up = normed.chunk(2, dim=1)
        act = cpu.product(x, made, norm=norm, eps=EPS, swiglu=True)
        assert torch.equal(act, (silu(gate.double()).float() * up).to(dtype))
        small = DenseLinear(torch.ones(3, w.K, dtype=dtype))
        both = cpu.two_products(x, made, small, norm, EPS)
        assert torch.equal(both[0], normed.to(dtype))
        assert torch.equal(both[1], linear(cpu.rms_norm(x, norm, EPS), small))


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("w", WEIGHTS, ids=IDS)
def test_the_product_of_tokens_with_one_scale_is_the_reference(w: PackedLinear) -> None:
    x, made = inputs(70, w.K, torch.bfloat16), prepare(w, torch.bfloat16, "whole")
    assert torch.equal(linear(x, made), whole_reference(x, w))
    gain = (1 + 0.1 * torch.randn(w.K, generator=torch.Generator().manual_seed(1))).bfloat16()
    factor = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    normed = factor * whole_reference((x.float() * gain.float()).bfloat16(), w)
    assert torch.equal(cpu.product(x, made, norm=gain, eps=EPS), normed.bfloat16())


@pytest.mark.parametrize("kind", ["int8", "whole"])
@pytest.mark.parametrize("w", WEIGHTS[1:5:3], ids=IDS[1:5:3])
def test_a_token_has_the_same_bits_in_any_company(w: PackedLinear, kind: Inputs) -> None:
    x, gain = inputs(700, w.K, torch.bfloat16), torch.linspace(0.5, 2, w.K).bfloat16()
    made = prepare(w, torch.bfloat16, kind)

    def product(x: Tensor) -> Tensor:
        return cpu.product(x, made, norm=gain, eps=EPS, swiglu=True)

    alone = torch.cat([product(token) for token in torch.split(x[:64], 1)])
    assert torch.equal(product(x[:64]), alone)
    whole = product(x)
    assert torch.equal(whole[:64], alone)
    for size in (33, 256):
        assert torch.equal(torch.cat([product(part) for part in torch.split(x, size)]), whole)


@pytest.mark.parametrize("kind", ["int8", "whole"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_stay_with_their_token(bad: float, kind: Inputs) -> None:
    w = WEIGHTS[4]
    x = inputs(3, w.K, torch.bfloat16)
    x[1, 570] = bad
    y = cpu.product(x, prepare(w, torch.bfloat16, kind), norm=torch.ones(w.K), eps=EPS)
    assert y.isnan().all(1).tolist() == [False, True, False]
    assert y[::2].isfinite().all()


@pytest.mark.parametrize("w", WEIGHTS, ids=IDS)
def test_prepared_bytes_are_what_is_held(w: PackedLinear) -> None:
    foreseen = prepared_bytes(
        w.N, w.K, Scheme(w.bits, w.group_size), w.scales.dtype, torch.bfloat16, "int8"
    )
    made = prepare(w, torch.bfloat16, "int8")
    assert not isinstance(made, DenseLinear)
    assert made.size_bytes == foreseen
