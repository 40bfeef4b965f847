"""widen: a tiled weight, or some tiles of it, as BF16 rows: w[n, k] = scale[n, k / G] * code[n, k].

Layout  weight in tiles of 16 rows (`tiles`) -> [rows, K] bf16
Bytes   N*K*bits/8 read, 2*N*K written; INT4, N = 24576, K = 4096: 250 MB = 58 us at 4.3 TB/s
Plan    a warp takes one step of a tile: its loads are those of the GEMV, and every lane's chunk is
        8 consecutive k, 16 bytes of a row. One rounding, of the FP32 product
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.launch.device import run
from lowbit.runtime.kernels.launch.linear import wide_weights
from lowbit.runtime.kernels.linear.tiles import TILE, TiledLinear, dequantized
from lowbit.runtime.kernels.linear.unpack import chunk_pairs
from lowbit.runtime.kernels.ptx.memory import store16, stream16
from lowbit.runtime.kernels.ptx.mma import (
    bf16_pair,
    high_half,
    low_half,
    pairs,
    threads,
    unpacked_scales,
)
from lowbit.runtime.kernels.rows import swiglu

WARPS = 4


def widen_ref(w: TiledLinear) -> Tensor:
    """The value `widen` gives for all tiles: [N, K] bfloat16."""
    return dequantized(w).bfloat16()


@gluon.jit
def _chunk(loads, q: gl.constexpr, half: gl.constexpr, CODEC: gl.constexpr, scale):
    """Four words of two BF16 weights: a lane's q-th chunk of a row."""
    out = ()
    if CODEC.SUBBYTE:
        codes = chunk_pairs(loads, q, half, CODEC)
        for i in gl.static_range(4):
            out = out + (bf16_pair(low_half(codes[i]) * scale, high_half(codes[i]) * scale),)
    else:
        for i in gl.static_range(2):
            low0, high0, low1, high1 = pairs(loads[half][2 * q + i], False)
            out = out + (
                _code_pair(low0, high0, scale),
                _code_pair(low1, high1, scale),
            )
    return out


@gluon.jit
def _code_pair(low, high, scale):
    """Two 8-bit codes from their low and high nibbles, times the scale."""
    first = low_half(low) + 16.0 * low_half(high)
    second = high_half(low) + 16.0 * high_half(high)
    return bf16_pair(first * scale, second * scale)


@gluon.jit(do_not_specialize=["first_tile", "tiles", "rows"])
def _widen_kernel(
    words_ptr, scales_ptr, out_ptr, first_tile, tiles, rows,
    PAIRED: gl.constexpr, W: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """rows: of the output; past it nothing is stored."""
    K: gl.constexpr = W.K
    SCALES: gl.constexpr = W.SCALES
    CODEC: gl.constexpr = W.CODEC  # Triton 3.6 takes no record from a record as an argument
    STEP_K: gl.constexpr = CODEC.STEP_K
    STEP_BYTES: gl.constexpr = W.CODEC.STEP_BYTES
    PRODUCTS: gl.constexpr = W.CODEC.PRODUCTS
    LOADS: gl.constexpr = W.CODEC.LOADS
    STEPS: gl.constexpr = W.STEPS
    GROUPS: gl.constexpr = W.GROUPS
    SCALE_WORDS: gl.constexpr = 2 if SCALES == "fp32" else 1
    warp, lane, _, _ = threads(WARPS)
    step = gl.program_id(1) * WARPS + warp
    local = gl.program_id(0)
    tile = (first_tile + local).to(gl.int64)
    at = words_ptr.to(gl.int64, bitcast=True) + tile * (STEPS * STEP_BYTES) + lane * 16
    at += gl.minimum(step, STEPS - 1).to(gl.int64) * STEP_BYTES
    loads = ()
    for i in gl.static_range(LOADS):
        loads = loads + (stream16(at + 512 * i),)
    scales = scales_ptr + (tile * (GROUPS * 8) + lane // 4) * SCALE_WORDS
    low_row = local * (8 if PAIRED else 16) + lane // 4
    high_row = low_row + (tiles * 8 if PAIRED else 8)
    for q in gl.static_range(PRODUCTS):
        k = step * STEP_K + q * 32 + lane % 4 * 8
        group = gl.minimum(k // W.G, GROUPS - 1)
        if SCALES == "fp32":
            raw = (gl.load(scales + group * 16), gl.load(scales + group * 16 + 1))
        else:
            raw = gl.load(scales + group * 8)
        low_scale, high_scale = unpacked_scales(raw, SCALES)
        inside = k < K
        out = out_ptr.to(gl.int64, bitcast=True) + k.to(gl.int64) * 2
        low_at = out + low_row.to(gl.int64) * (2 * K)
        high_at = out + high_row.to(gl.int64) * (2 * K)
        store16(low_at, _chunk(loads, q, 0, CODEC, low_scale), inside & (low_row < rows))
        store16(high_at, _chunk(loads, q, 1, CODEC, high_scale), inside & (high_row < rows))


def widen(w: TiledLinear, first: int = 0, count: int | None = None) -> Tensor:
    """The rows of some tiles in BF16.

    Args:
        w: [N, K].
        first: tile.
        count: tiles; None is all that follow.

    Returns:
        [rows, K]: where paired, the rows of all first halves and then those of the others; padding
        at the end of N is left out where w is not paired, and is zero where it is.
    """
    count = w.tiles - first if count is None else count
    rows = TILE * count if w.paired else min(w.N - TILE * first, TILE * count)
    out = torch.empty((rows, w.K), dtype=torch.bfloat16, device=w.words.device)
    run(
        _widen_kernel,
        (count, -(-w.steps // WARPS)),
        w.words,
        w.scales.view(torch.int32),
        out,
        first,
        count,
        rows,
        PAIRED=w.paired,
        W=w.constants,
        WARPS=WARPS,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return out


def widened_gemm(
    x: Tensor, w: TiledLinear, added: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """`added + x @ w.T` of many tokens, through BF16 weights and cuBLAS: [M, N] or [M, N / 2].

    Args:
        x: [M, K] bfloat16.
        w: [N, K]; some rows of it are wide at a time. Of a paired one `silu(gate) * up`, without
            `added`; gate and up are rounded in between.
        added: [M, N] or [1, N], added in FP32 before the one rounding.
        dtype: of the result, bfloat16 or float32; None is x's.
    """
    dtype = dtype or x.dtype
    each = TILE // 2 if w.paired else TILE  # columns of a tile
    N = w.N // 2 if w.paired else w.N
    y = torch.empty((x.shape[0], N), dtype=dtype, device=x.device)
    for first, wide in _blocks(w, x.shape[0]):
        rows = wide.shape[1] // 2 if w.paired else wide.shape[1]
        columns = slice(each * first, each * first + rows)
        part = y[:, columns]
        if w.paired:
            swiglu(torch.mm(x, wide), part)
        elif dtype != x.dtype:
            torch.mm(x, wide, out_dtype=dtype, out=part)
            if added is not None:
                part += added[:, columns]
        elif added is not None:
            torch.addmm(added[:, columns], x, wide, out=part)
        else:
            torch.mm(x, wide, out=part)
    return y


def _blocks(w: TiledLinear, tokens: int) -> Iterator[tuple[int, Tensor]]:
    """First tile and transposed rows, [K, rows], of every part that is wide at a time."""
    step = max(1, wide_weights(tokens) // (TILE * w.K))
    for first in range(0, w.tiles, step):
        yield first, widen(w, first, min(step, w.tiles - first)).T
