"""Dense GEMV against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels.linear.dense import dense_gemv, dense_gemv_ref
from lowbit.runtime.weights.linear import DenseLinear

Randn = Callable[..., Tensor]

gpu = pytest.mark.gpu

EPS = 1e-6
FP32_ERROR = 5e-7  # relative to the norm of the result; products are exact, only sums round
TOKENS = pytest.mark.parametrize("B", [1, 3, 16, 50, 100])

SHAPES = [(32, 1024), (8, 64), (3, 104), (5, 2104), (19, 1504)]
SHAPES += [(32, 2048), (64, 2560), (64, 4096), (96, 5120)]  # gates of linear attention
SHAPES += [(248320, 1024), (151936, 1024), (6144, 2560)]


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


@gpu
@TOKENS
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_dense_gemv(randn: Randn, N: int, K: int, B: int) -> None:
    x, w, residual, bias = randn(B, K), randn(N, K), randn(B, N), randn(1, N)
    y = dense_gemv(x, w, dtype=torch.float32)
    assert relative_error(y, dense_gemv_ref(x, w)) < FP32_ERROR
    assert torch.equal(dense_gemv(x, w), y.bfloat16())
    for added in (residual, bias):
        y = dense_gemv(x, w, added=added, dtype=torch.float32)
        assert relative_error(y, dense_gemv_ref(x, w, added=added)) < FP32_ERROR


@gpu
@TOKENS
@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
def test_normed(randn: Randn, N: int, K: int, wide: bool, B: int) -> None:
    """Products of x and the gain are rounded once; an FP32 gain is not rounded on its way in."""
    x, w, norm = 30 * randn(B, K), randn(N, K), 1 + 0.1 * randn(K).float() ** 2
    norm = norm if wide else norm.bfloat16()
    y = dense_gemv(x, w, norm=norm, eps=EPS, dtype=torch.float32)
    factor = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    scaled = (x.float() * norm.float()).bfloat16()
    assert relative_error(y, factor * dense_gemv_ref(scaled, w)) < FP32_ERROR


@gpu
def test_tiny_and_zero_inputs(randn: Randn, device: str) -> None:
    w, norm = randn(8, 256), torch.ones(256, device=device)
    zero = torch.zeros(1, 256, device=device, dtype=torch.bfloat16)
    assert bool((dense_gemv(zero, w, norm=norm, eps=EPS) == 0).all())
    tiny = torch.full((1, 256), 1e-30, device=device, dtype=torch.bfloat16)
    y = dense_gemv(tiny, w, norm=norm, eps=EPS, dtype=torch.float32)
    assert relative_error(y, dense_gemv_ref(tiny, w, norm=norm, eps=EPS)) < 1e-4


@gpu
@pytest.mark.parametrize("M", [1, 3, 20])
def test_bias(randn: Randn, bf16_error: float, M: int) -> None:
    """A bias reaches every token, through every kernel a linear may take."""
    w, x, norm, bias = DenseLinear(randn(96, 256)), randn(M, 256), 1 + 0.1 * randn(256), randn(96)
    bias *= 5
    y = cuda.product(x, w, norm=norm, eps=EPS, added=bias)
    plain = cuda.product(x, w, norm=norm, eps=EPS)
    ref = dense_gemv_ref(x, w.weight, norm=norm, eps=EPS, added=bias)
    # Normed tokens are rounded once more.
    assert relative_error(y, ref) < 2 * bf16_error
    assert relative_error(y.double() - plain.double(), bias.double().expand(M, -1)) < 0.05


@pytest.mark.parametrize(
    ("K", "dtype"), [(100, torch.bfloat16), (64, torch.float32)], ids=["columns", "dtype"]
)
def test_other_weights_are_refused(randn: Randn, K: int, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedModelError, match=f"32 x {K} in torch"):
        dense_gemv(randn(1, K), randn(32, K).to(dtype))


@gpu
def test_same_bytes_twice(randn: Randn) -> None:
    w, x, norm = randn(248320, 1024), randn(1, 1024), randn(1024)
    runs = [dense_gemv(x, w, norm=norm, eps=EPS) for _ in range(20)]
    assert all(torch.equal(runs[0], run) for run in runs)
