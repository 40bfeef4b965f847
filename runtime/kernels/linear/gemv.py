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

from lowbit.runtime.kernels.launch.card import Card
from lowbit.runtime.kernels.launch.choose import Variant, choose
from lowbit.runtime.kernels.launch.device import card_of, run
from lowbit.runtime.kernels.launch.linear import (
    DenseLaunch,
    GemvLaunch,
    WgmmaLaunch,
)
from lowbit.runtime.kernels.linear.dense import Rows, rows_bytes, rows_of
from lowbit.runtime.kernels.linear.digits import digits
from lowbit.runtime.kernels.linear.gemv_int8 import gemv_int8
from lowbit.runtime.kernels.linear.gemv_one import gemv_one_kernel
from lowbit.runtime.kernels.linear.gemv_several import gemv_join_kernel, gemv_several_kernel
from lowbit.runtime.kernels.linear.program import (
    Digits,
    Packed,
    global_digits,
    places_bytes,
    places_of,
)
from lowbit.runtime.kernels.linear.tiles import TiledLinear, dequantized
from lowbit.runtime.kernels.linear.wgmma import WgmmaPlan, wgmma, wgmma_plan
from lowbit.runtime.kernels.ptx.peers import MOST_PUSHED, Peers
from lowbit.runtime.thresholds import INT8_GEMV_TOKENS, PACKED_TOKENS
from lowbit.runtime.weights.share import Share

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
    variant: Variant | None = None,
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
        added: [B, N] or [1, N], a residual or a bias, added in FP32 before the one rounding.
        dtype: of the result; None is x's.

    Returns:
        [B, N], or [B, N / 2].
    """
    B = x.shape[0]
    if squares is not None and norm is not None:
        raise ValueError("squares of heads and the gain of a norm over all of x")
    y = torch.empty((B, w.N // (2 if w.paired else 1)), dtype=dtype or x.dtype, device=x.device)
    normed, card = norm is not None, card_of(x)
    most = PACKED_TOKENS if w.activations == "exact" else INT8_GEMV_TOKENS
    variant = variant or choose(w, min(B, most), card, normed=normed)
    if variant.most >= B:
        _launch(x, w, y, variant, Norm(eps, norm, squares), added)
        return y
    for first in range(0, B, variant.most):
        part = slice(first, first + variant.most)
        of_part = added if added is None or added.shape[0] == 1 else added[part]
        of_heads = None if squares is None else squares[part]
        own = choose(w, len(x[part]), card, normed=normed)
        _launch(x[part], w, y[part], own, Norm(eps, norm, of_heads), of_part)
    return y


def gemv_pushed(
    x: Tensor, w: TiledLinear, peers: Peers, squares: Tensor | None = None, eps: float = 0.0
) -> None:
    """Push `x @ w.T` of one token, as FP32, to all ranks; see `exchange.sum_pushed`.

    Args:
        x: [1, K] bfloat16, contiguous.
        w: [N, K], neither paired nor with inputs in eight bits, for which `pushes` holds.
        peers: memory of all ranks.
        squares: see `gemv`.
    """
    variant = choose(w, 1, card_of(x))
    _launch(x, w, peers.own, variant, Norm(eps, None, squares), peers=peers)


def pushes(w: TiledLinear, tokens: int, card: Card) -> bool:
    """True if `gemv_pushed` multiplies so many tokens."""
    if tokens > 1 or w.activations != "exact" or w.N > MOST_PUSHED:
        return False
    variant = choose(w, 1, card)
    return variant.way == "gemv" and variant.room == 1


def gemv_and_rows(
    x: Tensor, w: TiledLinear, rows: Tensor, *, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x) @ w.T` and `rms_norm(x) @ rows.T`, in one kernel.

    Args:
        x: [B, K] bfloat16, contiguous, of ROWS_TOKENS tokens at most.
        w: [N, K], not paired.
        rows: [n, K] bfloat16, few: a program takes 16 of them.
        norm: [K] gain of the RMS norm.

    Returns:
        [B, N] and [B, n] in x's dtype.
    """
    y, rows_y = x.new_empty((x.shape[0], w.N)), x.new_empty((x.shape[0], rows.shape[0]))
    variant = choose(w, x.shape[0], card_of(x), normed=True, beside=True)
    _launch(x, w, y, variant, Norm(eps, norm), rows=(rows, rows_y))
    return y, rows_y


@dataclass(frozen=True, slots=True, eq=False)
class GemvPlan:
    """A GEMV's constants; made once, so compared by identity (see `program`)."""

    W: Packed  # the weight
    X: Digits  # places of the digits
    LAUNCH: GemvLaunch  # share of a program
    PAIRED: bool  # whether rows are those of gate and up in turn, which become their SwiGLU
    HEAD: int  # elements of x that are normed by one of the sums of squares, where those are given
    ADDED_ROWS: bool  # whether each token has its own row of what is added, not all the same
    ROWS: int  # dense rows beside the tiles
    DENSE: Rows  # constants of the programs that multiply those
    SHARED: int  # bytes of shared memory
    SUMS: int  # to the sums of warps in shared memory
    JOINED: int  # sums of a tile, which programs that share it leave for the join
    PDL: bool  # whether the kernel takes part in programmatic launch
    RANK: int = 0  # that pushes the result
    RANKS: int = 0  # to which it goes; 0 where it is stored
    MOST_PUSHED: int = MOST_PUSHED  # words of a rank in a buffer


class Norm(NamedTuple):
    """Norm of x, or of its heads where their squares are given."""

    eps: float
    gain: Tensor | None = None
    squares: Tensor | None = None


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
    variant: Variant,
    norm: Norm,
    added: Tensor | None = None,
    rows: tuple[Tensor, Tensor] | None = None,
    peers: Peers | None = None,
) -> None:
    """Launch one product.

    Args:
        y: its result, which is left alone where that is pushed.
        rows: dense weights beside w, and the output of theirs.
        peers: to which it is pushed.
    """
    B, card, (eps, gain, squares) = x.shape[0], card_of(x), norm
    normed, added_rows = gain is not None, added is not None and added.shape[0] > 1
    if isinstance(variant.launch, WgmmaLaunch):
        share, room = variant.launch, variant.room
        hopper = wgmma_plan(w.constants, share, variant.parts, room, w.paired, added_rows)
        planes = digits(x, w.bits, hopper.X, norm=gain, squares=squares, eps=eps)
        _join(wgmma(planes, w, hopper), planes, w, y, added, hopper, normed)
        return
    if w.activations == "int8":
        gemv_int8(x, w, y, variant.gemv, variant.room, eps, gain, squares, added)
        return
    dense, rows_y = (None, None) if rows is None else rows
    heads = 0 if squares is None else squares.shape[1]
    fused = Fused(normed, heads, added_rows, 0 if dense is None else dense.shape[0])
    share = None if peers is None else peers.share
    plan = _plan(w.constants, variant, w.paired, fused, card.overlaps, card.shared_bytes, share)
    launch = plan.LAUNCH
    planes = sums = arrived = None
    one = plan.X.TOKENS == 1
    if not plan.X.STAGED:
        planes = digits(x, w.bits, plan.X, norm=gain, squares=squares, eps=eps)
        squares = None
    if launch.split > 1:
        count = launch.split * 16 if one else plan.X.TOKENS // 8 * launch.parts * 128
        count *= w.tiles + launch.program_tiles
        arrived = w.arrived
        sums = torch.empty(count, dtype=torch.float32, device=x.device)
    tensors = gain, squares, w.words, w.scales.view(torch.int32), added, dense, y, rows_y
    pushed = (None, None) if peers is None else (peers.addresses, peers.numbers)
    run(
        gemv_one_kernel if one else gemv_several_kernel,
        (-(-w.tiles // launch.program_tiles) + -(-plan.ROWS // 16), launch.split),
        x,
        *((*tensors, sums, arrived, *pushed) if one else (planes, *tensors, sums, B)),
        w.N,
        w.tiles,
        eps,
        PLAN=plan,
        num_warps=launch.warps,
        maxnreg=card.register_cap(launch.registers),
        launch_pdl=plan.PDL,
        enable_fp_fusion=True,
    )
    if sums is not None and planes is not None:
        _join(sums, planes, w, y, added, plan, normed)


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


@cache
def _plan(
    W: Packed,
    variant: Variant,
    paired: bool,
    fused: Fused,
    pdl: bool,
    limit: int,
    share: Share | None = None,
) -> GemvPlan:
    """Constants of a launch.

    Args:
        limit: bytes of shared memory on the GPU.
        share: rank that pushes the result.
    """
    launch, tokens = variant.gemv, variant.room
    if share is not None:  # the exchange looks for its number once it starts
        launch = replace(launch, early=False)
    places = places_of(W.K, launch, tokens, W.CODEC.STEP_K)
    digits_bytes = places_bytes(places, fused.normed) if variant.staged else 0
    needed = digits_bytes + launch.sums_bytes(tokens)
    if not variant.staged and launch.split > 1:
        needed = 16
    whole = tokens == 1 and W.K % 256 == 0
    rows = DenseLaunch(tokens)
    if fused.rows:
        needed = max(needed, rows_bytes(rows, W.K if tokens == 1 else 0))
    return GemvPlan(
        W,
        X=places if variant.staged else global_digits(W.K, W.BITS, tokens),
        LAUNCH=launch,
        PAIRED=paired,
        HEAD=W.K // fused.heads if fused.heads and variant.staged else 0,
        ADDED_ROWS=fused.added_rows,
        ROWS=fused.rows,
        DENSE=rows_of(W.K, rows, launch.warps, whole, pdl, launch.early),
        SHARED=max(launch.spread_bytes(limit) if pdl else 0, needed),
        SUMS=digits_bytes,
        JOINED=launch.parts,
        PDL=pdl,
        RANK=share.rank if share else 0,
        RANKS=share.ranks if share else 0,
    )
