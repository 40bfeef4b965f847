"""Dense GEMV against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels.dense_gemv import dense_gemv, dense_gemv_ref
from lowbit.runtime.kernels.launch import DENSE_GEMV_TILES, DenseGemvLaunch
from lowbit.runtime.weights.linear import DenseLinear

Randn = Callable[..., Tensor]
ToBf16 = Callable[[Tensor], Tensor]

EPS = 1e-6
FP32_ERROR = 5e-7  # relative to the norm of the result; products are exact, only sums round

SMALL = [(32, 1024), (8, 64), (3, 100), (5, 2100)]
REAL = [(32, 1024), (32, 2048), (64, 2560), (64, 4096), (96, 5120)]  # gates of linear attention
REAL += [(248320, 1024), (248320, 2048), (151936, 1024), (151936, 2560), (6144, 2560)]
SHAPES = SMALL + [pytest.param(*shape, marks=pytest.mark.gpu) for shape in REAL]


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_dense_gemv(randn: Randn, to_bf16: ToBf16, N: int, K: int) -> None:
    x, w, residual = randn(1, K), randn(N, K), randn(1, N)
    y = dense_gemv(x, w, dtype=torch.float32)
    assert relative_error(y, dense_gemv_ref(x, w)) < FP32_ERROR
    assert torch.equal(dense_gemv(x, w), to_bf16(y))
    y = dense_gemv(x, w, residual=residual, dtype=torch.float32)
    assert relative_error(y, dense_gemv_ref(x, w, residual=residual)) < FP32_ERROR


@pytest.mark.parametrize("tile", [tile for _, tile in DENSE_GEMV_TILES])
def test_every_tile(randn: Randn, monkeypatch: pytest.MonkeyPatch, tile: DenseGemvLaunch) -> None:
    monkeypatch.setattr("lowbit.runtime.kernels.dense_gemv.dense_gemv_launch", lambda N, K: tile)
    x, w, norm = randn(1, 1500), randn(19, 1500), randn(1500)
    y = dense_gemv(x, w, norm=norm, eps=EPS, dtype=torch.float32)
    assert relative_error(y, dense_gemv_ref(x, w, norm=norm, eps=EPS)) < FP32_ERROR


@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
def test_normed(randn: Randn, N: int, K: int, wide: bool) -> None:
    """An FP32 gain is not rounded on its way in."""
    x, w, norm = 30 * randn(1, K), randn(N, K), 1 + 0.1 * randn(K).float() ** 2
    norm = norm if wide else norm.bfloat16()
    y = dense_gemv(x, w, norm=norm, eps=EPS, dtype=torch.float32)
    assert relative_error(y, dense_gemv_ref(x, w, norm=norm, eps=EPS)) < FP32_ERROR


def test_tiny_and_zero_inputs(randn: Randn, device: str) -> None:
    w, norm = randn(8, 256), torch.ones(256, device=device)
    zero = torch.zeros(1, 256, device=device, dtype=torch.bfloat16)
    assert bool((dense_gemv(zero, w, norm=norm, eps=EPS) == 0).all())
    tiny = torch.full((1, 256), 1e-30, device=device, dtype=torch.bfloat16)
    y = dense_gemv(tiny, w, norm=norm, eps=EPS, dtype=torch.float32)
    assert relative_error(y, dense_gemv_ref(tiny, w, norm=norm, eps=EPS)) < 1e-4


@pytest.mark.parametrize("M", [1, 3])
def test_bias(randn: Randn, bf16_error: float, M: int) -> None:
    """A bias reaches every token, through every kernel a linear may take."""
    w, x, norm, bias = DenseLinear(randn(96, 256)), randn(M, 256), 1 + 0.1 * randn(256), randn(96)
    bias *= 5
    y = cuda.norm_linear(x, norm, EPS, w, bias)
    plain = cuda.norm_linear(x, norm, EPS, w)
    ref = dense_gemv_ref(x, w.weight, norm=norm, eps=EPS, residual=bias)
    # Several tokens are normed in a kernel of its own, which rounds once more.
    assert relative_error(y, ref) < 2 * bf16_error
    assert relative_error(y.double() - plain.double(), bias.double().expand(M, -1)) < 0.05


@pytest.mark.gpu
def test_same_bytes_twice(randn: Randn) -> None:
    w, x, norm = randn(248320, 1024), randn(1, 1024), randn(1024)
    runs = [dense_gemv(x, w, norm=norm, eps=EPS) for _ in range(20)]
    assert all(torch.equal(runs[0], run) for run in runs)
