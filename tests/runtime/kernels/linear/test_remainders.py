"""Inputs of a head: the rows of the reference, and logits with the bits of a lone token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.formats.activations import (
    activation_group,
    dequantize_activations,
    quantize_activations,
    with_remainders,
)
from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels.linear import gemv_int8, mma_int8, quantize
from lowbit.runtime.kernels.linear import remainders as module
from lowbit.runtime.kernels.linear.tiles import TiledLinear, dequantized
from lowbit.runtime.kernels.rows import rms_norm_ref
from lowbit.runtime.weights.linear import PackedLinear
from tests.lanes import in_kernels
from tests.runtime.kernels.emulator import run_kernel
from tests.runtime.kernels.linear.test_gemv_int8 import product

EPS = 1e-6

MakePacked = Callable[[int, int, int, int], PackedLinear]
Randn = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _emulated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        for each in (gemv_int8, mma_int8, quantize):
            monkeypatch.setattr(each, "run", run_kernel)


def rows_of(randn: Randn, M: int, K: int) -> Tensor:
    """Rows of many sizes, one of which begins with zeros."""
    x = (randn(M, K) * torch.logspace(-2, 2, M).to(randn(1))[:, None]).bfloat16()
    x[0, :200] = 0
    return x


@pytest.mark.parametrize("group", [32, 64, 128])
def test_two_rows_of_codes_have_sixteen_bits(randn: Randn, group: int) -> None:
    x = rows_of(randn, 6, 1000)
    both = with_remainders(x, group)
    q, s = quantize_activations(both, group)
    found = dequantize_activations(q, s, group).double().view(6, 2, 1000).sum(1)
    most = torch.nn.functional.pad(x.double().abs(), (0, -1000 % group)).view(6, -1, group).amax(-1)
    # A remainder is at most half a step of codes, 1 / 254 of the largest element, and keeps eight
    # bits, of which its own codes keep as many.
    bound = 1.01 * most * (1 / 254) * (2.0**-8 + 1 / 254)
    assert torch.equal(both[::2], x)
    assert bool(((found - x.double()).abs() <= bound.repeat_interleave(group, 1)[:, :1000]).all())


@pytest.mark.parametrize(("K", "group"), [(4096, 128), (1120, 32), (576, 64), (200, 128)])
def test_the_kernel_has_the_rows_of_the_reference(
    randn: Randn, bf16_error: float, K: int, group: int
) -> None:
    x, gain = rows_of(randn, 5, K), randn(K).bfloat16()
    both = module.with_remainders(x, group, gain, EPS)
    exact = rms_norm_ref(x, gain, EPS)
    assert bool(((both[::2].double() - exact).abs() <= 2 * bf16_error * exact.abs()).all())
    expected = with_remainders(both[::2].contiguous(), group)[1::2]
    if x.is_cuda:
        assert torch.equal(both[1::2], expected)
    else:  # the interpreter cuts digits off where a GPU rounds
        off = (both[1::2].float() - expected.float()).abs()
        assert bool((off <= 2 * bf16_error * expected.float().abs() + 1e-12).all())


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_what_is_no_number_gives_no_logits(make_packed: MakePacked, randn: Randn) -> None:
    x, gain = rows_of(randn, 3, 1024), randn(1024).bfloat16()
    x[1, 40] = torch.nan
    x[2, 50] = torch.inf
    head = cuda.prepare(make_packed(8, 32, 1024, 128), inputs="int16")
    y = cuda.product(x, head, norm=gain, eps=EPS, logits=True)
    assert bool(y[0].isfinite().all())
    assert bool(y[1:].isnan().all())


ON_GPU: list[Any] = [(8, 20_000, 4096, 128), (4, 4096, 2560, 32), (3, 640, 1152, 128)]


@in_kernels("8-48-1024-128")
@pytest.mark.parametrize(
    ("bits", "N", "K", "G"),
    [(8, 48, 1024, 128), (4, 40, 1120, 32)]
    + [pytest.param(*case, marks=pytest.mark.gpu) for case in ON_GPU],
)
def test_logits_have_the_bits_of_a_lone_token(
    make_packed: MakePacked, randn: Randn, bits: int, N: int, K: int, G: int
) -> None:
    """Steps by every kernel have the bits of the reference, which is close to FP64."""
    w, gain = make_packed(bits, N, K, G), randn(K).bfloat16()
    head = cuda.prepare(w, inputs="int16")
    assert isinstance(head, TiledLinear)
    M = 200 if w.codes.is_cuda else 9
    x = rows_of(randn, M, K)
    both = module.with_remainders(x, activation_group(G, K), gain, EPS)
    sums = product(both, w)
    expected = sums[::2] + sums[1::2]
    for count in (1, 2, 4, 5, 8, 40, 64, M):
        y = cuda.product(x[:count], head, norm=gain, eps=EPS, logits=True)
        assert torch.equal(y, expected[:count]), count
        last = cuda.product(x[-count:], head, norm=gain, eps=EPS, logits=True)
        assert torch.equal(last, expected[-count:]), count
    normed, weight = both[::2].double(), dequantized(head).double()
    off = (expected.double() - normed @ weight.T).abs()
    size = normed.abs() @ weight.abs().T
    assert bool((off <= size * 2.0**-11).all())
    assert float(off.mean() / size.mean()) < 2.0**-17


def test_a_head_has_a_norm_and_nothing_to_add(make_packed: MakePacked, randn: Randn) -> None:
    head = cuda.prepare(make_packed(8, 32, 1024, 128), inputs="int16")
    with pytest.raises(ValueError, match="a head is given a norm"):
        cuda.product(randn(1, 1024).bfloat16(), head, logits=True)
