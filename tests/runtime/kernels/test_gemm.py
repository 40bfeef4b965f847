"""GEMM against float64 on the exact stored codes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.gemm import gemm, gemm_ref
from lowbit.runtime.linear import PackedLinear

MakePacked = Callable[[int, int, int, int], PackedLinear]
Randn = Callable[..., Tensor]
ToBf16 = Callable[[Tensor], Tensor]

FP32_ERROR = 1e-6  # relative to the norm of the result; products are exact, only sums round

SMALL = [(2, 19, 256, 32), (17, 33, 768, 768), (70, 67, 512, 128), (5, 7, 96, 32)]
REAL = [(16, 6144, 4096, 128), (100, 4096, 9728, 512), (512, 5120, 25600, 25600)]
REAL += [(1000, 4096, 4096, 32), (3, 151936, 1024, 128)]
SHAPES = SMALL + [pytest.param(*shape, marks=pytest.mark.gpu) for shape in REAL]


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("M", "N", "K", "G"), SHAPES)
def test_gemm(
    make_packed: MakePacked,
    randn: Randn,
    to_bf16: ToBf16,
    bits: int,
    M: int,
    N: int,
    K: int,
    G: int,
) -> None:
    w, x, residual = make_packed(bits, N, K, G), randn(M, K), randn(M, N)
    y = gemm(x, w, residual, torch.float32)
    assert relative_error(y, gemm_ref(x, w, residual)) < FP32_ERROR
    assert torch.equal(gemm(x, w, residual), to_bf16(y))
    assert relative_error(gemm(x, w, dtype=torch.float32), gemm_ref(x, w)) < FP32_ERROR


def test_one_residual_for_every_row(make_packed: MakePacked, randn: Randn) -> None:
    """A bias is an expanded residual; it is not copied for every token."""
    w, x, bias = make_packed(4, 33, 256, 64), randn(18, 256), randn(33)
    y = gemm(x, w, bias.expand(18, -1), torch.float32)
    assert relative_error(y, gemm_ref(x, w, bias)) < FP32_ERROR


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_do_not_mix(make_packed: MakePacked, randn: Randn, bits: int) -> None:
    """A NaN token spoils its own row alone."""
    w, x = make_packed(bits, 33, 256, 64), randn(18, 256)
    clean = gemm(x, w)
    x[7] = float("nan")
    y = gemm(x, w)
    assert bool(y[7].isnan().all())
    others = [m for m in range(18) if m != 7]
    assert torch.equal(y[others], clean[others])
