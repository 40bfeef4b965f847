"""GEMV against float64 on the exact stored codes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.gemv import gemv, gemv_ref, gemv_swiglu, gemv_swiglu_ref
from lowbit.runtime.linear import PackedLinear

MakePacked = Callable[[int, int, int, int], PackedLinear]
Randn = Callable[..., Tensor]
ToBf16 = Callable[[Tensor], Tensor]

EPS = 1e-6
# FP32 rounding of sums whose terms are up to 272 / 4.6 (INT4) and 512 / 74 (INT8) times the size of
# the products they stand for; relative to the norm of the result.
FP32_ERROR = {4: 2e-5, 8: 1e-6}

SMALL = [(19, 256, 32), (33, 768, 768), (7, 1024, 128), (2, 96, 32), (5, 512, 512), (9, 384, 64)]
REAL = [(6144, 4096, 128), (24576, 4096, 32), (4096, 12288, 256), (2560, 9728, 512)]
REAL += [(5120, 25600, 25600), (151936, 1024, 128), (1001, 3072, 64)]
SHAPES = SMALL + [pytest.param(*shape, marks=pytest.mark.gpu) for shape in REAL]


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("N", "K", "G"), SHAPES)
def test_gemv(
    make_packed: MakePacked, randn: Randn, to_bf16: ToBf16, bits: int, N: int, K: int, G: int
) -> None:
    w, x = make_packed(bits, N, K, G), randn(1, K)
    y = gemv(x, w, dtype=torch.float32)
    assert relative_error(y, gemv_ref(x, w)) < FP32_ERROR[bits]
    assert torch.equal(gemv(x, w), to_bf16(y))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("N", "K", "G"), SHAPES)
def test_gemv_fused(
    make_packed: MakePacked, randn: Randn, to_bf16: ToBf16, bits: int, N: int, K: int, G: int
) -> None:
    w, x, norm, residual = make_packed(bits, N, K, G), randn(1, K), 1 + randn(K), randn(1, N)
    y = gemv(x, w, norm=norm, eps=EPS, dtype=torch.float32)
    assert relative_error(y, gemv_ref(x, w, norm=norm, eps=EPS)) < FP32_ERROR[bits]
    y = gemv(x, w, residual=residual, dtype=torch.float32)
    assert relative_error(y, gemv_ref(x, w, residual=residual)) < FP32_ERROR[bits]
    assert torch.equal(gemv(x, w, residual=residual), to_bf16(y))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("N", "K", "G"), SHAPES)
def test_gemv_swiglu(
    make_packed: MakePacked, randn: Randn, bf16_error: float, bits: int, N: int, K: int, G: int
) -> None:
    w, x, norm = make_packed(bits, N // 2 * 2, K, G), randn(1, K), 1 + randn(K)
    y, ref = gemv_swiglu(x, norm, EPS, w).double(), gemv_swiglu_ref(x, norm, EPS, w)
    bound = bf16_error * ref.abs() + 20 * FP32_ERROR[bits] * ref.square().mean().sqrt()
    assert bool(((y - ref).abs() <= bound).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_is_exact(make_packed: MakePacked, device: str, bits: int) -> None:
    """With one-hot x the sum is one weight: its value comes back, for every code and place."""
    w = make_packed(bits, 5, 256, 32)
    weight = w.dequantized()
    for k in (*range(32), 255):
        x = torch.zeros(1, 256, device=device, dtype=torch.bfloat16)
        x[0, k] = 1.0
        y = gemv(x, w, dtype=torch.float32)
        # 1 + u / 256 keeps u, but the sum passes through 264 or 384: half an ulp of that, scaled.
        bound = 2.0**-15 * w.scales[:, k // 32].float().abs()
        assert bool(((y[0] - weight[:, k]).abs() <= bound).all())


def test_tiny_and_zero_inputs(make_packed: MakePacked, device: str) -> None:
    """Zeros stay zero, and eps carries a vector too small for its own mean square."""
    w, norm = make_packed(4, 8, 256, 32), torch.ones(256, device=device, dtype=torch.bfloat16)
    zero = torch.zeros(1, 256, device=device, dtype=torch.bfloat16)
    assert bool((gemv(zero, w, norm=norm, eps=EPS) == 0).all())
    tiny = torch.full((1, 256), 1e-30, device=device, dtype=torch.bfloat16)
    y = gemv(tiny, w, norm=norm, eps=EPS, dtype=torch.float32)
    assert relative_error(y, gemv_ref(tiny, w, norm=norm, eps=EPS)) < 1e-4


@pytest.mark.parametrize("bits", [4, 8])
def test_fp32_gain_is_not_rounded(make_packed: MakePacked, randn: Randn, bits: int) -> None:
    w, x, norm = make_packed(bits, 16, 768, 128), randn(1, 768), 1 + 0.1 * randn(768).float() ** 2
    assert not torch.equal(norm, norm.bfloat16().float())
    y = gemv(x, w, norm=norm, eps=EPS, dtype=torch.float32)
    assert relative_error(y, gemv_ref(x, w, norm=norm, eps=EPS)) < FP32_ERROR[bits]


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_same_bytes_twice(make_packed: MakePacked, randn: Randn, bits: int) -> None:
    w, x, norm = make_packed(bits, 6144, 4096, 128), randn(1, 4096), randn(4096)
    runs = [gemv(x, w, norm=norm, eps=EPS) for _ in range(20)]
    assert all(torch.equal(runs[0], run) for run in runs)
