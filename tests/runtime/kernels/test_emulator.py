"""The emulator, on kernels that a GPU has proven: it finds what they compute, and their errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels import dense_gemv as dense_module
from lowbit.runtime.kernels import gemv as gemv_module
from lowbit.runtime.kernels.dense_gemv import dense_gemv, dense_gemv_ref
from lowbit.runtime.kernels.gemv import gemv, gemv_ref
from lowbit.runtime.kernels.tiles import TiledLinear
from tests.runtime.kernels.emulator import run_kernel

MakeTiled = Callable[..., TiledLinear]
Randn = Callable[..., Tensor]

EPS = 1e-6
FP32_ERROR = 5e-6


@pytest.fixture(autouse=True)
def _emulated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda":
        pytest.skip("a GPU runs the kernels itself")
    for module in (gemv_module, dense_module):
        monkeypatch.setattr(module, "run", run_kernel)


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


@pytest.mark.parametrize("B", [1, 3, 8])
@pytest.mark.parametrize("bits", [4, 8])
def test_gemv(make_tiled: MakeTiled, randn: Randn, bits: int, B: int) -> None:
    w, x = make_tiled(bits, 40, 352, 32), randn(B, 352)
    residual = torch.randn(B, 40)
    y = gemv(x, w, added=residual, dtype=torch.float32)
    assert relative_error(y, gemv_ref(x, w, added=residual)) < FP32_ERROR
    norm = torch.exp2(torch.randint(-1, 2, (352,)).float())  # products with x are exact
    y = gemv(x, w, norm=norm, eps=EPS, dtype=torch.float32)
    assert relative_error(y, gemv_ref(x, w, norm=norm, eps=EPS)) < FP32_ERROR


def test_dense_gemv(randn: Randn) -> None:
    """Alone a token is staged, in company it is not: the same bits."""
    w, x, norm = randn(37, 512), randn(21, 512), randn(512)
    alone = torch.cat([dense_gemv(x[i : i + 1], w, norm=norm, eps=EPS) for i in range(21)])
    assert torch.equal(dense_gemv(x, w, norm=norm, eps=EPS), alone)
    y = dense_gemv(x, w, dtype=torch.float32)
    assert relative_error(y, dense_gemv_ref(x, w)) < FP32_ERROR


def test_what_lies_outside_of_memory_is_noticed(
    randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = randn(32, 256)
    dense_gemv(randn(2, 256), w)

    def shorter(kernel: Any, grid: tuple[int, ...], x: Tensor, *rest: Any, **named: Any) -> None:
        run_kernel(kernel, grid, x.flatten()[:-8].clone(), *rest, **named)

    monkeypatch.setattr(dense_module, "run", shorter)
    with pytest.raises(AssertionError, match="behind the tensor"):
        dense_gemv(randn(2, 256), w)
