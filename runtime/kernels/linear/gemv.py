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
        kernel waits for its predecessor. Sums of warps and of programs are added in order, whoever
        comes last, so bit-reproducible. How many warps share a tile depends on the weight alone,
        and a token is summed in the order of k: so its result has the same bits in any company
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.runtime.kernels.launch.device import (
    card_of,
    power_of_two,
    programmatic_launch,
    register_cap,
    run,
)
from lowbit.runtime.kernels.launch.linear import (
    DenseLaunch,
    GemvLaunch,
    WgmmaLaunch,
    gemv_launch,
    wgmma_launch,
)
from lowbit.runtime.kernels.linear.dense import Rows, rows_bytes, rows_of
from lowbit.runtime.kernels.linear.digits import digits
from lowbit.runtime.kernels.linear.gemv_one import gemv_one_kernel
from lowbit.runtime.kernels.linear.gemv_several import gemv_join_kernel, gemv_several_kernel
from lowbit.runtime.kernels.linear.program import (
    BLOCK_K,
    Digits,
    Packed,
    global_digits,
    staged_digits,
)
from lowbit.runtime.kernels.linear.tiles import TiledLinear, dequantized
from lowbit.runtime.kernels.linear.wgmma import WgmmaPlan, wgmma, wgmma_plan
from lowbit.runtime.thresholds import GEMV_TOKENS, WGMMA_TOKENS

JOIN_WARPS = 4  # of a program that joins the sums of others


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
    most = most_tokens(x, w)
    if most >= B:
        _launch(x, w, y, eps, norm, squares, added)
        return y
    for first in range(0, B, most):
        part = slice(first, first + most)
        of_part = added if added is None or added.shape[0] == 1 else added[part]
        of_heads = None if squares is None else squares[part]
        _launch(x[part], w, y[part], eps, norm, of_heads, of_part)
    return y


def gemv_and_rows(
    x: Tensor, w: TiledLinear, rows: Tensor, *, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x) @ w.T` and `rms_norm(x) @ rows.T`, in one kernel.

    Args:
        x: [B, K] bfloat16, contiguous, of ROWS_TOKENS tokens at most.
        w: [N, K], not paired.
        rows: [n, K] bfloat16, few: a program takes 16 of them.
        norm: [K] gain of the RMS norm.
        eps: of the norm.

    Returns:
        [B, N] and [B, n] in x's dtype.
    """
    y, rows_y = x.new_empty((x.shape[0], w.N)), x.new_empty((x.shape[0], rows.shape[0]))
    _launch(x, w, y, eps, norm, rows=(rows, rows_y))
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
        DENSE: constants of the programs that multiply those.
        SHARED: bytes of shared memory.
        SUMS: to the sums of warps in shared memory.
        JOINED: sums of a tile, which programs that share it leave for the join.
        PDL: whether the kernel takes part in programmatic launch.
    """

    W: Packed
    X: Digits
    LAUNCH: GemvLaunch
    PAIRED: bool
    HEAD: int
    ADDED_ROWS: bool
    ROWS: int
    DENSE: Rows
    SHARED: int
    SUMS: int
    JOINED: int
    PDL: bool


class Fused(NamedTuple):
    """Work that a GEMV does beside the product: norms, residual and dense rows."""

    normed: bool
    heads: int
    added_rows: bool
    rows: int


def _launch(
    x: Tensor,
    w: TiledLinear,
    y: Tensor,
    eps: float,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
    added: Tensor | None = None,
    rows: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launch one product into y; rows: dense weights beside w, and the output of theirs."""
    B, pdl = x.shape[0], programmatic_launch(x)
    hopper = None if rows is not None else _plan_on_hopper(x, w, added)
    if hopper is not None:
        planes = digits(x, w.bits, hopper.X, norm=norm, squares=squares, eps=eps)
        _join(wgmma(planes, w, hopper), planes, w, y, added, hopper, norm is not None)
        return
    dense, rows_y = (None, None) if rows is None else rows
    plan = _plan_for(
        w,
        power_of_two(B),
        Fused(
            norm is not None,
            0 if squares is None else squares.shape[1],
            added is not None and added.shape[0] > 1,
            0 if dense is None else dense.shape[0],
        ),
        pdl,
        card_of(x).shared_bytes,
        card_of(x).multiprocessors,
    )
    launch = plan.LAUNCH
    planes = sums = arrived = None
    one = plan.X.TOKENS == 1
    if not plan.X.STAGED:
        planes = digits(x, w.bits, plan.X, norm=norm, squares=squares, eps=eps)
        squares = None
    if launch.split > 1:
        count = launch.split * 16 if one else plan.X.TOKENS // 8 * launch.parts * 128
        count *= w.tiles + launch.program_tiles
        arrived = w.arrived
        sums = torch.empty(count, dtype=torch.float32, device=x.device)
    tensors = norm, squares, w.words, w.scales.view(torch.int32), added, dense, y, rows_y
    run(
        gemv_one_kernel if one else gemv_several_kernel,
        (-(-w.tiles // launch.program_tiles) + -(-plan.ROWS // 16), launch.split),
        x,
        *((*tensors, sums, arrived) if one else (planes, *tensors, sums, B)),
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
        _join(sums, planes, w, y, added, plan, norm is not None)


def _join(
    sums: Tensor,
    planes: Tensor,
    w: TiledLinear,
    y: Tensor,
    added: Tensor | None,
    plan: GemvPlan | WgmmaPlan,
    normed: bool,
) -> None:
    """Join the sums of all parts into y; planes: hold the factors of the norm."""
    run(
        gemv_join_kernel,
        (-(-w.tiles * (plan.X.TOKENS // 8) // JOIN_WARPS),),
        sums,
        planes,
        added,
        y,
        y.shape[0],
        w.N,
        w.tiles,
        NORM=normed,
        WARPS=JOIN_WARPS,
        PLAN=plan,
        num_warps=JOIN_WARPS,
        launch_pdl=plan.PDL,
        enable_fp_fusion=True,
    )


def most_tokens(x: Tensor, w: TiledLinear) -> int:
    """Most tokens that one launch multiplies by this weight."""
    return WGMMA_TOKENS if launch_on_hopper(x, w, WGMMA_TOKENS) else GEMV_TOKENS


def launch_on_hopper(x: Tensor, w: TiledLinear, tokens: int) -> WgmmaLaunch | None:
    """The share of a program of `wgmma` where it multiplies so many tokens."""
    if tokens < 16 or not card_of(x).is_hopper or w.scales.dtype == torch.float32:
        return None
    parts = gemv_launch(w.bits, w.tiles, w.steps, 1, w.paired, w.tuned).parts
    count = card_of(x).multiprocessors
    return wgmma_launch(w.bits, w.tiles, w.steps, w.group_size, tokens, parts, count)


def _plan_on_hopper(x: Tensor, w: TiledLinear, added: Tensor | None) -> WgmmaPlan | None:
    tokens = power_of_two(x.shape[0])
    launch = launch_on_hopper(x, w, tokens)
    if launch is None:
        return None
    parts = gemv_launch(w.bits, w.tiles, w.steps, 1, w.paired, w.tuned).parts
    added_rows = added is not None and added.shape[0] > 1
    return wgmma_plan(w.constants, launch, parts, tokens, w.paired, added_rows)


def _plan_for(
    w: TiledLinear, tokens: int, fused: Fused, pdl: bool, limit: int, count: int
) -> GemvPlan:
    launch = gemv_launch(w.bits, w.tiles, w.steps, tokens, w.paired, w.tuned, count)
    plan = _plan(w.constants, launch, tokens, w.paired, fused, pdl, limit)
    if tokens == 1 and not plan.X.STAGED:  # the kernel for one token has no other way
        return _plan_for(w, 2, fused, pdl, limit, count)
    return plan


@cache
def _plan(
    W: Packed, launch: GemvLaunch, tokens: int, paired: bool, fused: Fused, pdl: bool, limit: int
) -> GemvPlan:
    """Constants for a power of two of tokens; limit: bytes of shared memory on the GPU."""
    if tokens == 1 and launch.split > 1 and fused.normed:  # every program needs all squares
        launch = replace(launch, warps=launch.parts, abreast=1, rounds=1, split=1, registers=128)
    places = places_of(W.K, launch, tokens, W.WIDTH.STEP_K)
    needed = _staged_bytes(places, fused.normed) + launch.sums_bytes(tokens)
    staged = launch.staged and (launch.split == 1 or tokens == 1) and needed <= limit
    if not staged:
        needed = launch.sums_bytes(tokens) if launch.split == 1 else 16
    whole = tokens == 1 and W.K % 256 == 0
    rows = DenseLaunch(tokens)
    if fused.rows:
        needed = max(needed, rows_bytes(rows, W.K if tokens == 1 else 0))
    return GemvPlan(
        W,
        X=places if staged else global_digits(W.K, W.BITS, tokens),
        LAUNCH=launch,
        PAIRED=paired,
        HEAD=W.K // fused.heads if fused.heads and staged else 0,
        ADDED_ROWS=fused.added_rows,
        ROWS=fused.rows,
        DENSE=rows_of(W.K, rows, launch.warps, whole, pdl, launch.early),
        SHARED=max(launch.spread_bytes(limit) if pdl else 0, needed),
        SUMS=_staged_bytes(places, fused.normed) if staged else 0,
        JOINED=launch.parts,
        PDL=pdl,
    )


def staged_bytes(K: int, tokens: int, normed: bool) -> int:
    """Shared memory for digits, squares of blocks and factors."""
    return _staged_bytes(staged_digits(K, tokens), normed)


def places_of(K: int, launch: GemvLaunch, tokens: int, step_k: int) -> Digits:
    """Places of what a program stages of x: of a lone token its share of the blocks."""
    if tokens > 1 or launch.split == 1:
        return staged_digits(K, tokens)
    return staged_digits(K, 1, launch.split, launch.each * step_k // BLOCK_K.value)


def _staged_bytes(places: Digits, normed: bool) -> int:
    tokens = places.TOKENS
    return places.FACTORS + -(-tokens // 4) * 16 if normed else places.SQUARES


def shared_bytes(K: int, launch: GemvLaunch, tokens: int, normed: bool) -> int:
    """Shared memory of a program that stages x, a power of two of tokens."""
    return staged_bytes(K, tokens, normed) + launch.sums_bytes(tokens)
