"""gemv_join: join the sums of a GEMV whose tiles several programs share.

Layout  sums [tiles, tokens / 8, parts, 32 lanes, 4] fp32 -> y [B, N]
Fused   the factor of an RMS norm; residual + y or bias + y; silu(gate) * up for a paired weight
Bytes   4*N*tokens*parts
Plan    a warp takes 16 rows and 8 tokens, and adds the parts in order, as a program does that has
        all of them
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import programmatic_launch, run
from lowbit.runtime.kernels.linear.digits import given_factor
from lowbit.runtime.kernels.linear.products import store_result
from lowbit.runtime.kernels.linear.program import Digits
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.kernels.ptx.memory import load16
from lowbit.runtime.kernels.ptx.mma import as_float, threads

WARPS = 4


def sums_of(w: TiledLinear, tokens: int, parts: int, overhang: int) -> Tensor:
    """Room for the sums; overhang: tiles that programs have together at most beyond the last."""
    return torch.empty(
        (w.tiles + overhang) * (tokens // 8) * parts * 128,
        dtype=torch.float32,
        device=w.words.device,
    )


@gluon.jit(do_not_specialize=["B", "N", "tiles", "added_stride"])
def _gemv_join_kernel(
    sums_ptr, digits_ptr, added_ptr, y_ptr, B, N, tiles, added_stride,
    PAIRED: gl.constexpr, NORM: gl.constexpr, BITS: gl.constexpr, PARTS: gl.constexpr,
    X: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    NT: gl.constexpr = X.TOKENS // 8
    warp, lane, _, none = threads(WARPS)
    item = gl.program_id(0) * WARPS + warp
    tile = item // NT
    inside = tile < tiles
    g = lane // 4
    first = item % NT * 8 + lane % 4 * 2  # of the lane's two tokens
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = gl.minimum(item, tiles * NT - 1) * (PARTS * 512) + lane * 16
    at = sums_ptr.to(gl.int64, bitcast=True) + at
    loaded = ()
    for part in gl.static_range(PARTS):
        loaded = loaded + (load16(at, part * 512),)
    added = ()
    if added_ptr is not None:
        for i in gl.static_range(4):
            n = gl.minimum(tile * 16 + i // 2 * 8 + g, N - 1)
            b = gl.minimum(first + i % 2, B - 1)
            added = added + (gl.load(added_ptr + n + b * added_stride).to(gl.float32),)
    y = (none, none, none, none)
    for part in gl.static_range(PARTS):
        v = loaded[part]
        y = (
            y[0] + as_float(v[0]),
            y[1] + as_float(v[1]),
            y[2] + as_float(v[2]),
            y[3] + as_float(v[3]),
        )
    factor = none + (1.0 if BITS == 8 else 0.0625)
    for column in gl.static_range(2):
        b = first + column
        own = factor
        if NORM:
            own = factor * given_factor(digits_ptr, b, X)
        more = ()
        if added_ptr is not None:
            more = (added[column], added[2 + column])
        store_result(
            y_ptr, y[column] * own, y[2 + column] * own, more, tile, g, b, inside & (b < B), N,
            PAIRED,
        )  # fmt: skip


def join(
    sums: Tensor,
    planes: Tensor,
    w: TiledLinear,
    y: Tensor,
    added: Tensor | None,
    places: Digits,
    parts: int,
    normed: bool,
) -> None:
    """Fill y [B, N] or [B, N / 2] from the sums of all parts.

    Args:
        sums: of `sums_of`.
        planes: of `digits`, with the factors of the norm.
        w: [N, K].
        y: bfloat16 or float32.
        added: [B, N] or [1, N], added in FP32 before the one rounding.
        places: of the digits.
        parts: of a tile's steps.
        normed: whether x is.
    """
    pdl = programmatic_launch(y)
    run(
        _gemv_join_kernel,
        (-(-w.tiles * (places.TOKENS // 8) // WARPS),),
        sums,
        planes,
        added,
        y,
        y.shape[0],
        w.N,
        w.tiles,
        0 if added is None or added.shape[0] == 1 else w.N,
        PAIRED=w.paired,
        NORM=normed,
        BITS=w.bits,
        PARTS=parts,
        X=places,
        WARPS=WARPS,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
