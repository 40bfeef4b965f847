"""Tiles to BF16 bit for bit, and the product of many tokens over them against float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.linear import widen as module
from lowbit.runtime.kernels.linear.tiles import TILE, TiledLinear
from lowbit.runtime.kernels.linear.widen import widen, widen_ref, widened_gemm

pytestmark = pytest.mark.gpu

MakeTiled = Callable[..., TiledLinear]
Randn = Callable[..., Tensor]

# Relative to the norm of the result. Products are exact; tensor cores drop digits as they add.
FP32_ERROR = 2e-5

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# N, K, G: odd rows, tails of a step, one to many groups in it, a group of several steps or a row
SHAPES = [(1, 96, 32), (19, 96, 96), (33, 2560, 64), (130, 2560, 512), (40, 2560, 2560)]
SHAPES += [(16, 4096, 32), (1001, 4096, 128), (50, 4096, 256), (7, 4096, 4096)]
HALVES = pytest.mark.parametrize("paired", [False, True], ids=["rows", "paired"])
BITS = pytest.mark.parametrize("bits", [2, 3, 4, 8])


@pytest.fixture(autouse=True)
def new_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element that nothing stores is seen."""
    empty = torch.empty

    def full_of_nan(*size: Any, **options: Any) -> Tensor:
        out = empty(*size, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", full_of_nan)


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


def product(x: Tensor, w: TiledLinear, added: Tensor | None = None) -> Tensor:
    """The value `widened_gemm` approximates: [M, N] float64."""
    y = x.double() @ widen_ref(w).double().T
    return y if added is None else y + added.double()


@HALVES
@BITS
@pytest.mark.parametrize(("N", "K", "G"), SHAPES)
def test_widened(make_tiled: MakeTiled, bits: int, N: int, K: int, G: int, paired: bool) -> None:
    w = make_tiled(bits, N + N % 2 if paired else N, K, G, paired)
    rows = widen(w)
    if paired:  # both halves end with padding
        gate, up = rows.chunk(2)
        assert not gate[w.N // 2 :].any()
        assert not up[w.N // 2 :].any()
        rows = torch.cat((gate[: w.N // 2], up[: w.N // 2]))
    assert rows.dtype == BF16
    assert rows.shape == (w.N, K)
    assert torch.equal(bits_of(rows), bits_of(widen_ref(w)))


@BITS
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize(("K", "G"), [(96, 32), (2560, 64), (4096, 512)])
def test_scales_of_other_dtypes(
    make_tiled: MakeTiled, bits: int, K: int, G: int, dtype: torch.dtype
) -> None:
    """The product is rounded once: a scale rounded first would give other bits."""
    w = make_tiled(bits, 37, K, G, False, dtype)
    assert torch.equal(bits_of(widen(w)), bits_of(widen_ref(w)))


@HALVES
@BITS
def test_some_of_the_tiles(make_tiled: MakeTiled, bits: int, paired: bool) -> None:
    w = make_tiled(bits, 150, 2560, 128, paired)
    whole = widen(w)
    for first, count in ((0, 1), (1, 3), (4, 5), (w.tiles - 1, 1), (3, None)):
        rows = widen(w, first, count)
        last = w.tiles if count is None else first + count
        parts = whole.chunk(2) if paired else (whole,)
        unit = TILE // len(parts)
        expected = torch.cat([part[first * unit : last * unit] for part in parts])
        assert torch.equal(bits_of(rows), bits_of(expected))


# M, N, K, G
PRODUCTS = [(33, 50, 96, 32), (100, 1001, 2560, 128), (1024, 6144, 4096, 128)]
PRODUCTS += [(40, 4096, 12288, 256), (257, 37, 4096, 4096)]


@BITS
@pytest.mark.parametrize(("M", "N", "K", "G"), PRODUCTS)
def test_gemm(
    make_tiled: MakeTiled,
    randn: Randn,
    bf16_error: float,
    bits: int,
    M: int,
    N: int,
    K: int,
    G: int,
) -> None:
    w, x, residual, bias = make_tiled(bits, N, K, G), randn(M, K), randn(M, N), randn(1, N)
    assert relative_error(widened_gemm(x, w), product(x, w)) < bf16_error
    assert relative_error(widened_gemm(x, w, dtype=FP32), product(x, w)) < FP32_ERROR
    for added in (residual, bias):
        assert relative_error(widened_gemm(x, w, added), product(x, w, added)) < bf16_error
        y = widened_gemm(x, w, added, FP32)
        assert y.dtype == FP32
        assert relative_error(y, product(x, w, added)) < FP32_ERROR


@pytest.mark.parametrize("N", [96, 100, 6144])
def test_gemm_swiglu(make_tiled: MakeTiled, randn: Randn, bf16_error: float, N: int) -> None:
    """Gate comes before up; what pads the last tile is left out."""
    w, x = make_tiled(4, N, 2560, 128, True), randn(70, 2560)
    gate, up = product(x, w).chunk(2, 1)
    y = widened_gemm(x, w)
    assert y.shape == (70, N // 2)
    assert relative_error(y, torch.nn.functional.silu(gate) * up) < 2 * bf16_error


@HALVES
@pytest.mark.parametrize("tiles", [1, 3, 7])
def test_blocks_of_tiles_join(
    make_tiled: MakeTiled,
    randn: Randn,
    bf16_error: float,
    monkeypatch: pytest.MonkeyPatch,
    tiles: int,
    paired: bool,
) -> None:
    """A large weight is widened some tiles at a time; the last block is a shorter one."""
    N, K = 150, 2560
    w, x, residual, bias = make_tiled(4, N, K, 128, paired), randn(40, K), randn(40, N), randn(1, N)
    seen = []

    def noted(w: TiledLinear, first: int, count: int) -> Tensor:
        seen.append((first, count))
        return widen(w, first, count)

    monkeypatch.setattr(module, "wide_weights", lambda tokens: tiles * TILE * K)
    monkeypatch.setattr(module, "widen", noted)
    if paired:
        gate, up = product(x, w).chunk(2, 1)
        error = relative_error(widened_gemm(x, w), torch.nn.functional.silu(gate) * up)
        assert error < 2 * bf16_error
    else:
        assert relative_error(widened_gemm(x, w), product(x, w)) < bf16_error
    assert seen == [(at, min(tiles, w.tiles - at)) for at in range(0, w.tiles, tiles)]
    if not paired:
        assert relative_error(widened_gemm(x, w, dtype=FP32), product(x, w)) < FP32_ERROR
        for added in (residual, bias):
            assert relative_error(widened_gemm(x, w, added), product(x, w, added)) < bf16_error
            assert (
                relative_error(widened_gemm(x, w, added, FP32), product(x, w, added)) < FP32_ERROR
            )


def test_rows_do_not_mix(make_tiled: MakeTiled, randn: Randn) -> None:
    """A NaN token spoils its own row alone."""
    w, x = make_tiled(4, 33, 256, 64), randn(40, 256)
    clean = widened_gemm(x, w)
    x[7] = float("nan")
    y = widened_gemm(x, w)
    assert bool(y[7].isnan().all())
    others = [m for m in range(40) if m != 7]
    assert torch.equal(y[others], clean[others])
