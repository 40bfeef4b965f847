"""Linear layers on a CPU against FP64 on the stored codes: error, bytes held, every block order.

Each kind of processor's product of many tokens is tested on every processor, fast or not.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from lowbit.formats.layout.packing import pack
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.backends import cpu_linear
from lowbit.runtime.backends.cpu_linear import (
    FEW_ROWS,
    Int8Rows,
    Planes,
    linear,
    prepare,
    prepared_bytes,
)
from lowbit.runtime.thresholds import EXACT_TOKENS
from lowbit.runtime.weights.linear import DenseLinear, PackedLinear

CAPABILITY = torch.backends.cpu.get_cpu_capability()
ROUNDED_ONCE = 2.0e-3  # relative L2 error; rounding the exact result to BF16 gives 1.66e-3
ROUNDED_WEIGHTS = 2.7e-3  # and with weights rounded to BF16 before, 2.36e-3
OF_MANY_TOKENS = {True: ROUNDED_WEIGHTS, False: ROUNDED_ONCE}  # by whether BF16 is multiplied


def packed(
    N: int, K: int, bits: int, group_size: int, scales: torch.dtype = torch.bfloat16
) -> PackedLinear:
    """Random codes over the whole range, scales of both signs."""
    generator = torch.Generator().manual_seed(N + K + bits + group_size)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (N, K), generator=generator, dtype=torch.int8)
    scale = torch.rand(N, K // group_size, generator=generator) * 0.01 + 0.001
    sign = torch.randint(2, scale.shape, generator=generator) * 2 - 1
    return PackedLinear(pack(codes, bits), (scale * sign).to(scales), bits, group_size)


def inputs(M: int, K: int) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(M)).bfloat16()


def error(w: PackedLinear, x: Tensor) -> float:
    exact = x.double() @ w.dequantized().double().T
    got = linear(x, prepare(w, torch.bfloat16)).double()
    return float((got - exact).norm() / exact.norm())


SHAPES = [(192, 576, 64), (64, 256, 128), (80, 96, 32), (64, 512, 256), (128, 1024, 512)]


@pytest.mark.parametrize("M", [1, 3, 16])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("N", "K", "G"), SHAPES)
def test_few_tokens_are_rounded_once(N: int, K: int, G: int, bits: int, M: int) -> None:
    w = packed(N, K, bits, G)
    assert isinstance(prepare(w, torch.bfloat16), Planes)
    assert error(w, inputs(M, K)) < ROUNDED_ONCE


@pytest.fixture(params=[True, False], ids=["bf16", "fp32"])
def in_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Multiply many tokens as on a processor that multiplies BF16, or as on others."""
    monkeypatch.setattr(cpu_linear, "multiplies_bf16", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("N", "K", "G"), SHAPES)
def test_many_tokens_are_the_dequantized_product(
    N: int, K: int, G: int, bits: int, in_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, x, bound = packed(N, K, bits, G), inputs(100, K), OF_MANY_TOKENS[in_bf16]
    assert error(w, x) < bound
    monkeypatch.setattr(cpu_linear, "CHUNK_WEIGHTS", K * 64)  # a block at a time
    assert error(w, x) < bound


@pytest.mark.parametrize("M", [1, EXACT_TOKENS, 100])
@pytest.mark.parametrize("N", [24, 2 * FEW_ROWS])
def test_dense_weights(N: int, M: int, in_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "CHUNK_WEIGHTS", 96 * 5)  # the last piece is smaller
    weight = torch.randn(N, 96, generator=torch.Generator().manual_seed(N)).bfloat16()
    x = inputs(M, 96)
    exact = x.double() @ weight.double().T
    for dtype, bound in ((torch.bfloat16, ROUNDED_ONCE), (torch.float32, 1e-6)):
        got = linear(x.to(dtype), DenseLinear(weight.to(dtype)))
        assert got.dtype == dtype
        assert float((got - exact).norm() / exact.norm()) < bound


@pytest.mark.usefixtures("in_bf16")
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_code_survives_the_planes(bits: int) -> None:
    """The identity through both products gives every weight back, rounded to BF16."""
    codes = torch.arange(-(1 << bits - 1), 1 << bits - 1, dtype=torch.int8).repeat(64, 256 >> bits)
    codes = torch.stack([row.roll(n) for n, row in enumerate(codes)])
    scale = torch.linspace(-2, 2, 64 * 4).view(64, 4).bfloat16()
    w = PackedLinear(pack(codes, bits), scale, bits, 64)
    made = prepare(w, torch.bfloat16)
    expected = w.dequantized().bfloat16()
    eye = torch.eye(256, dtype=torch.bfloat16)
    assert torch.equal(linear(eye, made).T, expected)
    assert torch.equal(torch.cat([linear(row[None], made) for row in eye]).T, expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("N", "K"), [(64, 96), (80, 64), (16, 64), (464, 160)])
def test_codes_lie_as_pytorch_orders_them(
    bits: int, N: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whole blocks alone, rows left over, rows left over alone, and several pieces."""
    monkeypatch.setattr(cpu_linear, "CHUNK_BYTES", 3 * 64 * 160)
    w = packed(N, K, bits, 32)
    made = prepare(w, torch.bfloat16)
    monkeypatch.setattr(cpu_linear, "_block_rows", lambda: None)  # of no known order
    expected = prepare(w, torch.bfloat16)
    assert isinstance(made, Planes)
    assert isinstance(expected, Planes)
    assert torch.equal(made.blocks, expected.blocks)
    assert torch.equal(made.scale_zero, expected.scale_zero)


@pytest.mark.slow
@pytest.mark.skipif(CAPABILITY == "AVX2", reason="the test above has run with AVX2")
def test_block_order_of_a_cpu_with_avx2() -> None:
    """The test above, in a process that uses no more than AVX2."""
    test = f"{__file__}::{test_every_code_survives_the_planes.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("M", [1, EXACT_TOKENS, 200])
def test_int8_rows(M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "CHUNK_WEIGHTS", 576 * 7)  # the last piece is smaller
    w = packed(48, 576, 8, 576)
    assert isinstance(prepare(w, torch.bfloat16), Int8Rows)
    assert error(w, inputs(M, 576)) < ROUNDED_ONCE


@pytest.mark.parametrize(
    "w",
    [
        packed(24, 128, 8, 64),  # rows that the product does not take
        packed(32, 96, 4, 48),  # groups likewise
        packed(24, 128, 3, 64),
        packed(32, 128, 8, 64, torch.float16),
    ],
    ids=["N24", "G48", "N24-INT3", "float16"],
)
def test_what_no_product_takes_is_dense(w: PackedLinear) -> None:
    made = prepare(w, torch.bfloat16)
    assert isinstance(made, DenseLinear)
    assert torch.equal(made.weight, w.dequantized().bfloat16())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_fp32_is_exact(bits: int) -> None:
    w = packed(64, 256, bits, 64)
    made = prepare(w, torch.float32)
    assert isinstance(made, DenseLinear)
    assert torch.equal(made.weight, w.dequantized())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("N", "K", "G"), [*SHAPES, (48, 576, 576), (24, 128, 64), (32, 96, 48), (64, 1536, 1536)]
)
def test_prepared_bytes_are_what_is_held(
    N: int, K: int, G: int, bits: int, dtype: torch.dtype
) -> None:
    w = packed(N, K, bits, G)
    foreseen = prepared_bytes(N, K, Scheme(bits, G), torch.bfloat16, dtype)
    assert prepare(w, dtype).size_bytes == foreseen


def test_int8_in_groups_holds_its_packed_bytes_once() -> None:
    N, K = 576, 1536
    made = prepare(packed(N, K, 8, 128), torch.bfloat16)
    assert made.size_bytes == N * K + N * (K // 128) * 8
