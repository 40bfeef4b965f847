"""gemv: y[b, n] = sum_k scale[n, k / G] * code[n, k] * x[b, k]     (few tokens, FP32 sums).

Layout  weight in tiles of 16 rows (`tiles`), x [B, K] bf16 -> y [B, N]
Fused   RMS norm of x: x * gain is rounded to bf16 and rsqrt(mean(x^2) + eps) multiplies the result;
        or norms of its heads, whose sums of squares are given, before x becomes digits;
        residual + y or bias + y; silu(gate) * up for a paired weight
Bytes   N*K*bits/8 + 2*N*K/G; INT4, N = K = 4096, G = 128: 8.65 MB = 1.9 us at 4.56 TB/s
Plan    a program takes tiles over the whole of K, or several share them; the warps of a tile take
        its steps in turn. Tokens become three digits each, and bytes are multiplied
        (`gemv_digits`): every program stages them in shared memory, or a kernel before (`digits`)
        leaves them in global memory. Scales multiply FP32 sums. Weights are on their way before the
        kernel waits for its predecessor. Warps are summed in order; no atomics, so
        bit-reproducible. How many warps share a tile depends on the weight alone, and a token is
        summed in the order of k: so its result has the same bits in any company
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lowbit.runtime.kernels.launch.device import (
    STATIC_SHARED,
    power_of_two,
    programmatic_launch,
    register_cap,
    run,
    shared_limit,
)
from lowbit.runtime.kernels.launch.linear import GemvLaunch, gemv_launch
from lowbit.runtime.kernels.launch.tokens import GEMV_TOKENS
from lowbit.runtime.kernels.linear.dense import Rows, rows_bytes, rows_of
from lowbit.runtime.kernels.linear.digits import digits
from lowbit.runtime.kernels.linear.gemv_one import gemv_one_kernel
from lowbit.runtime.kernels.linear.gemv_several import gemv_several_kernel
from lowbit.runtime.kernels.linear.join import join, sums_of
from lowbit.runtime.kernels.linear.program import (
    Digits,
    Packed,
    global_digits,
    packed,
    staged_digits,
)
from lowbit.runtime.kernels.linear.tiles import SCALES, TiledLinear, dequantized
from lowbit.runtime.kernels.ptx.memory import declaration, large_size


def gemv_ref(
    x: Tensor,
    w: TiledLinear,
    *,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
) -> Tensor:
    """The value `gemv` approximates: [B, N] float64 on the exact stored codes."""
    x = x.double()
    if squares is not None:
        heads = x.view(*squares.shape[:2], -1)
        mean = squares.double().sum(-1, keepdim=True) / heads.shape[2]
        x = (heads * torch.rsqrt(mean + eps)).view(x.shape)
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.double()
    y = x @ dequantized(w).double().T
    return y if added is None else y + added.double()


def gemv(
    x: Tensor,
    w: TiledLinear,
    *,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`added + rms_norm(x) @ w.T`; `silu(gate) * up` of it for a paired weight.

    Args:
        x: [B, K] bfloat16, contiguous.
        w: [N, K].
        norm: [K] gain of the RMS norm; None leaves x as it is.
        squares: [B, heads, SQUARES] float32, parts of the sum of the squares that norm each head of
            x, which need not be those of x; without `norm`.
        eps: of the norm.
        added: [B, N] or [1, N], a residual or a bias, added in FP32 before the one rounding.
        dtype: of the result; None is x's.

    Returns:
        [B, N], or [B, N / 2].
    """
    B = x.shape[0]
    if squares is not None and norm is not None:
        raise ValueError("squares of heads and the gain of a norm over all of x")
    y = torch.empty((B, w.N // (2 if w.paired else 1)), dtype=dtype or x.dtype, device=x.device)
    if B <= GEMV_TOKENS:
        _launch(x, w, norm, eps, added, y, squares)
        return y
    for first in range(0, B, GEMV_TOKENS):
        part = slice(first, first + GEMV_TOKENS)
        of_part = added if added is None or added.shape[0] == 1 else added[part]
        of_heads = None if squares is None else squares[part]
        _launch(x[part], w, norm, eps, of_part, y[part], of_heads)
    return y


def gemv_and_rows(
    x: Tensor, w: TiledLinear, rows: Tensor, *, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x) @ w.T` and `rms_norm(x) @ rows.T` of up to 16 tokens, in one kernel.

    Args:
        x: [B, K] bfloat16, contiguous.
        w: [N, K], not paired.
        rows: [n, K] bfloat16, few: a program takes 16 of them.
        norm: [K] gain of the RMS norm.
        eps: of the norm.

    Returns:
        [B, N] and [B, n] in x's dtype.
    """
    y, rows_y = x.new_empty((x.shape[0], w.N)), x.new_empty((x.shape[0], rows.shape[0]))
    _launch(x, w, norm, eps, None, y, None, rows, rows_y)
    return y, rows_y


@dataclass(frozen=True, slots=True, eq=False)
class GemvPlan:
    """A GEMV's constants; made once, so compared by identity (see `program`).

    Attributes:
        W: the weight.
        X: places of the digits.
        LAUNCH: share of a program.
        PAIRED: whether rows are those of gate and up in turn, which become their SwiGLU.
        HEAD: elements of x that are normed by one of the sums of squares, where those are given.
        ADDED_ROWS: whether each token has its own row of what is added, not all the same.
        ROWS: dense rows beside the tiles.
        ROW_PROGRAMS: the first programs, which multiply those: they take longest.
        DENSE: constants of those.
        SHARED: declaration of shared memory, or empty for LARGE.
        LARGE: bytes of shared memory that are more than a kernel can declare, or 0.
        SUMS: to the sums of warps in shared memory.
        PDL: whether the kernel takes part in programmatic launch.
    """

    W: Packed
    X: Digits
    LAUNCH: GemvLaunch
    PAIRED: bool
    HEAD: int
    ADDED_ROWS: bool
    ROWS: int
    ROW_PROGRAMS: int
    DENSE: Rows
    SHARED: str
    LARGE: int
    SUMS: int
    PDL: bool


def _launch(
    x: Tensor,
    w: TiledLinear,
    norm: Tensor | None,
    eps: float,
    added: Tensor | None,
    y: Tensor,
    squares: Tensor | None = None,
    rows: Tensor | None = None,
    rows_y: Tensor | None = None,
) -> None:
    B, normed, pdl = x.shape[0], norm is not None, programmatic_launch(x)
    fixed = (
        (w.K, w.group_size, w.bits, SCALES[w.scales.dtype]),
        normed,
        w.paired,
        0 if squares is None else squares.shape[1],
        added is not None and added.shape[0] > 1,
        0 if rows is None else rows.shape[0],
        pdl,
        shared_limit(x),
    )
    tokens = power_of_two(B)
    launch = gemv_launch(w.bits, w.tiles, w.steps, tokens, w.paired)
    plan = _plan(launch, tokens, *fixed)
    if tokens == 1 and not plan.X.STAGED:  # which several tokens need not be
        launch = gemv_launch(w.bits, w.tiles, w.steps, 2, w.paired)
        plan = _plan(launch, 2, *fixed)
    tokens = plan.X.TOKENS
    planes = sums = None
    if not plan.X.STAGED:
        planes = digits(x, w.bits, plan.X, norm=norm, squares=squares, eps=eps)
        squares = None
    if launch.split > 1:
        sums = sums_of(w, tokens, launch.parts, launch.program_tiles)
    one = tokens == 1
    run(
        gemv_one_kernel if one else gemv_several_kernel,
        (-(-w.tiles // launch.program_tiles) + plan.ROW_PROGRAMS, launch.split),
        x,
        *(() if one else (planes,)),
        norm,
        squares,
        w.words,
        w.scales.view(torch.int32),
        added,
        rows,
        y,
        rows_y,
        *(() if one else (sums, B)),
        w.N,
        w.tiles,
        eps,
        PLAN=plan,
        num_warps=launch.warps,
        maxnreg=register_cap(x, launch.registers),
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    if sums is not None and planes is not None:
        join(sums, planes, w, y, added, plan.X, launch.parts, normed)


@cache
def _plan(
    launch: GemvLaunch,
    tokens: int,
    codes: tuple[int, int, int, str],
    normed: bool,
    paired: bool,
    heads: int,
    added_rows: bool,
    rows: int,
    pdl: bool,
    limit: int,
) -> GemvPlan:
    W = packed(*codes)
    needed = shared_bytes(W.K, launch, tokens, normed)
    staged = launch.staged and launch.split == 1 and needed <= limit
    if not staged:
        needed = sums_bytes(launch, tokens) if launch.split == 1 else 16
    dense = rows_of(W.K, tokens, launch.warps, tokens == 1 and W.K % 256 == 0, pdl, launch.early)
    if rows:
        needed = max(needed, rows_bytes(tokens, W.K if tokens == 1 else 0))
    size = max(launch.shared << 10 if pdl else 0, needed)
    return GemvPlan(
        W,
        X=staged_digits(W.K, tokens) if staged else global_digits(W.K, tokens),
        LAUNCH=launch,
        PAIRED=paired,
        HEAD=W.K // heads if heads and staged else 0,
        ADDED_ROWS=added_rows,
        ROWS=rows,
        ROW_PROGRAMS=-(-rows // 16),
        DENSE=dense,
        SHARED=declaration(size) if size <= STATIC_SHARED else "",
        LARGE=0 if size <= STATIC_SHARED else large_size(size),
        SUMS=staged_bytes(W.K, tokens, normed) if staged else 0,
        PDL=pdl,
    )


def staged_bytes(K: int, tokens: int, normed: bool) -> int:
    """Shared memory for digits, squares of blocks and factors."""
    places = staged_digits(K, tokens)
    return places.FACTORS + -(-tokens // 4) * 16 if normed else places.SQUARES


def sums_bytes(launch: GemvLaunch, tokens: int) -> int:
    """Shared memory for the sums of each warp."""
    return launch.warps * launch.tiles * launch.rounds * 64 * tokens


def shared_bytes(K: int, launch: GemvLaunch, tokens: int, normed: bool) -> int:
    """Shared memory of a program that stages x, a power of two of tokens."""
    return staged_bytes(K, tokens, normed) + sums_bytes(launch, tokens)
