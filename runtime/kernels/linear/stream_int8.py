"""stream_int8: the product of `gemm_int8` for few tokens, whose x lies in shared memory as a whole.

    y[m, n] = sum_g s_x[m, g] * (s_w[n, g] * sum_k code[n, k] * q[m, k])     groups g in any order

or silu(gate) * up of such a product, where the weight is paired; see `formats.activations`.

Layout  x as `quantize` leaves it in one block of tokens, weight in tiles of 16 rows (`tiles`) -> y
        [M, N], or [M, N / 2] where paired, bf16 or fp32
Fused   RMS norm of x, or norms of its heads, in `quantize`; the norm's factor, residual + y or
        bias + y, silu(gate) * up for a paired weight
Bytes   N*K*bits/8 + 2*N*K/G once, M*K*(1 + 4/128) for each program, 2*M*N or 4*M*N
Plan    a program for each multiprocessor, with its share of the tiles. It copies all of x into
        shared memory while its first words are on their way; after that nothing stands between a
        warp and its words, which it loads to registers some steps ahead. Some warps share a tile
        and take its steps in turn; their sums meet in shared memory once a round of tiles
Bits    sums begin at a centre and are exact after each term's own rounding, or are integers: a
        token's are those of `gemm_int8` and `gemv_int8`
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.formats.activations import activation_group
from lowbit.runtime.kernels.launch.device import card_of, run
from lowbit.runtime.kernels.launch.stream import StreamLaunch, stream_shared
from lowbit.runtime.kernels.linear.gemm_store import load_added, store_block
from lowbit.runtime.kernels.linear.int8_steps import (
    centres_of_tiles,
    integer_starts,
    multiply_step,
    numbers_of_rows,
)
from lowbit.runtime.kernels.linear.products import load_steps, tile_addresses
from lowbit.runtime.kernels.linear.program import BLOCK_K, Blocks, Packed, token_blocks, wide
from lowbit.runtime.kernels.linear.quantize import MOST_WARPS, bound_pair, factor_pair, quantize
from lowbit.runtime.kernels.linear.sums import row_numbers, scaled
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    large_shared_buffer,
    large_size,
    load_shared16_if,
    store_shared16,
)
from lowbit.runtime.kernels.ptx.mma import as_float, as_word, threads
from lowbit.runtime.kernels.ptx.wgmma import bulk_copy, expect_bytes, init_barriers, wait_bytes

REGISTERS = 255  # of a thread


@dataclass(frozen=True, slots=True, eq=False)
class StreamPlan:
    """Constants of a launch; made once, so compared by identity (see `program`)."""

    W: Packed  # the weight, `wide`
    X: Blocks  # places of x
    WARPS: int
    GROUPS: int  # of warps, each with tiles of its own
    TILES: int  # of 16 rows that a warp multiplies together
    AHEAD: int  # steps of words on their way
    ROUNDS: int
    PAIRED: bool  # whether rows are those of gate and up in turn, which become their SwiGLU
    NORMED: bool  # whether each token has a factor
    SUMS: int  # bytes from the start of shared memory to the sums of a round
    ROUND: int  # bytes of these
    FULL: int  # bytes to the barriers of x
    SHARED: int  # bytes of shared memory
    SUMMED: bool  # whether two rows of x are a token; see `remainders`


@cache
def stream_plan(
    W: Packed, X: Blocks, launch: StreamLaunch, paired: bool, normed: bool, summed: bool
) -> StreamPlan:
    """Constants for a weight and a block of tokens."""
    shared = stream_shared(X.STEPS, X.GROUP, launch, X.WHOLE)
    own = -(-X.STEPS // launch.parts)
    return StreamPlan(
        wide(W), X, launch.warps, launch.groups, launch.tiles, min(launch.ahead, own),
        launch.rounds, paired, normed, shared.sums, shared.round, shared.full,
        large_size(shared.size), summed,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "N", "tiles", "stride"])
def _stream_int8_kernel(
    x_ptr, words_ptr, scales_ptr, rows_ptr, added_ptr, out_ptr, M, N, tiles, stride,
    PLAN: gl.constexpr,
):  # fmt: skip
    """N: columns of the output; stride: from row to row of what is added."""
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    WARPS: gl.constexpr = PLAN.WARPS
    TILES: gl.constexpr = PLAN.TILES
    PARTS: gl.constexpr = WARPS // PLAN.GROUPS  # warps that share a tile
    OWN: gl.constexpr = (X.STEPS + PARTS - 1) // PARTS  # steps of a warp
    NT: gl.constexpr = X.TOKENS // 8
    gdc_launch_dependents()
    warp, lane, zero, _ = threads(WARPS)
    buffer = large_shared_buffer(N < 0, PLAN.SHARED, WARPS) + zero
    part = warp % PARTS
    leads = (warp == 0) & (lane == 0)
    first = gl.program_id(0) * (PLAN.ROUNDS * PLAN.GROUPS * TILES)
    tile = first + warp // PARTS * TILES
    at = tile_addresses(words_ptr, scales_ptr, tile, tiles, part, lane, TILES, W)
    loaded = ()
    AHEAD: gl.constexpr = PLAN.AHEAD
    for c in gl.static_range(AHEAD):
        loaded = loaded + (_load(at, part, c, PARTS, PLAN),)
    BOUNDED: gl.constexpr = 0 if X.WHOLE else TILES
    rows = numbers_of_rows(rows_ptr, tile, tiles, lane, BOUNDED)
    init_barriers(buffer + PLAN.FULL, leads, OWN)
    barrier()
    gdc_wait()
    x = x_ptr.to(gl.int64, bitcast=True) + zero.to(gl.int64)
    for c in gl.static_range(OWN):
        full = buffer + PLAN.FULL + c * 8
        at_x = c * PARTS * X.SIZE
        expect_bytes(full, leads, min(PARTS, X.STEPS - c * PARTS) * X.SIZE)
        bulk_copy(buffer + at_x, x + at_x, full, leads, min(PARTS, X.STEPS - c * PARTS) * X.SIZE)
    tokens = ()
    for nt in gl.static_range(0 if X.WHOLE else NT):
        tokens = tokens + (bound_pair(x_ptr, 1, nt * 8 + lane % 4 * 2, X),)
    one = as_float(zero) + W.CODEC.FACTOR
    factors = ((one, one),)
    if PLAN.NORMED:
        own = factor_pair(x_ptr, 1, warp % NT * 8 + lane % 4 * 2, X)
        factors = ((own[0] * one, own[1] * one),)
    if PLAN.ROUNDS > 1:
        for turn in range(PLAN.ROUNDS - 1):
            tile += PLAN.GROUPS * TILES
            next_at = tile_addresses(words_ptr, scales_ptr, tile, tiles, part, lane, TILES, W)
            next_rows = numbers_of_rows(rows_ptr, tile, tiles, lane, BOUNDED)
            units = _load_units(rows_ptr, first, warp, lane, tiles, PLAN)
            given = _load_added(added_ptr, first, warp, lane, M, N, stride, PLAN)
            sums = buffer + PLAN.SUMS + turn % 2 * PLAN.ROUND
            loaded = _multiply_round(
                loaded, at, next_at, rows, tokens, buffer, sums, warp, lane, zero + turn == 0,
                True, PLAN,
            )  # fmt: skip
            barrier()
            _store_round(
                sums, units, added_ptr, given, out_ptr, first, warp, lane, M, N, stride, factors,
                PLAN,
            )  # fmt: skip
            first += PLAN.GROUPS * TILES
            at = next_at
            rows = next_rows
    units = _load_units(rows_ptr, first, warp, lane, tiles, PLAN)
    given = _load_added(added_ptr, first, warp, lane, M, N, stride, PLAN)
    sums = buffer + PLAN.SUMS + (PLAN.ROUNDS - 1) % 2 * PLAN.ROUND
    _multiply_round(
        loaded, at, at, rows, tokens, buffer, sums, warp, lane, zero + PLAN.ROUNDS == 1, False, PLAN
    )
    barrier()
    _store_round(
        sums, units, added_ptr, given, out_ptr, first, warp, lane, M, N, stride, factors, PLAN
    )


@gluon.jit
def _load(at, part, c: gl.constexpr, PARTS: gl.constexpr, PLAN: gl.constexpr):
    """Words and raw scales of the warp's step c; past the last step scales of zero."""
    W: gl.constexpr = PLAN.W
    words, raw = load_steps(at, part, c, 1, PARTS, W)
    if (c + 1) * PARTS > PLAN.X.STEPS:
        inside = part + c * PARTS < PLAN.X.STEPS
        own = ()
        for i in gl.static_range(len(raw)):
            if W.SCALES == "fp32":
                own = own + ((gl.where(inside, raw[i][0], 0), gl.where(inside, raw[i][1], 0)),)
            else:
                own = own + (gl.where(inside, raw[i], 0),)
        raw = own
    return words, raw


@gluon.jit
def _multiply_round(
    loaded, at, next_at, rows, tokens, buffer, sums, warp, lane, first, NEXT: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Leave the sums of a warp's steps of its tiles, and return what it has loaded next.

    first: whether x may still be on its way.
    """
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    TILES: gl.constexpr = PLAN.TILES
    PARTS: gl.constexpr = PLAN.WARPS // PLAN.GROUPS
    OWN: gl.constexpr = (X.STEPS + PARTS - 1) // PARTS
    AHEAD: gl.constexpr = PLAN.AHEAD
    COUNT: gl.constexpr = X.TOKENS // 2  # sums of a tile in a lane
    part = warp % PARTS
    if X.WHOLE:
        acc = integer_starts(lane, TILES * COUNT)
    else:
        acc = centres_of_tiles(rows, tokens, W.CODEC.FACTOR)
    for c in gl.static_range(OWN):
        later = loaded
        if c + AHEAD < OWN:
            later = later + (_load(at, part, c + AHEAD, PARTS, PLAN),)
        elif NEXT:
            later = later + (_load(next_at, part, c + AHEAD - OWN, PARTS, PLAN),)
        wait_bytes(buffer + PLAN.FULL + c * 8, first)
        if (c + 1) * PARTS <= X.STEPS:
            here = buffer + part * X.SIZE + c * PARTS * X.SIZE
        else:
            here = buffer + gl.minimum(part + c * PARTS, X.STEPS - 1) * X.SIZE
        acc = multiply_step(acc, loaded[0], here, lane * 0, lane, X.TOKENS, W, X)
        loaded = ()
        for i in gl.static_range(1, len(later)):
            loaded = loaded + (later[i],)
    centres = ()
    if not X.WHOLE:
        centres = centres_of_tiles(rows, tokens, W.CODEC.FACTOR)
    at = sums + warp // PARTS * (TILES * PARTS * X.TOKENS * 64) + part * (X.TOKENS * 64) + lane * 16
    for r in gl.static_range(TILES):
        for i in gl.static_range(0, COUNT, 4):
            words = ()
            for j in gl.static_range(4):
                one = acc[r * COUNT + i + j]
                if not X.WHOLE:
                    one -= centres[r * COUNT + i + j]
                words = words + (as_word(one),)
            store_shared16(at + (r * PARTS * X.TOKENS * 64 + i * 128), words, lane >= 0)
    return loaded


@gluon.constexpr_function
def _turns(plan):
    """Times that a warp adds up 8 tokens of a tile in a round."""
    return -(-plan.GROUPS * plan.TILES * (plan.X.TOKENS // 8) // plan.WARPS)


@gluon.jit
def _item(turn, warp, M, PLAN: gl.constexpr):
    """Tile of a round and first token of what a warp adds up, and whether it does."""
    NT: gl.constexpr = PLAN.X.TOKENS // 8
    item = turn * PLAN.WARPS + warp
    inside = item < PLAN.GROUPS * PLAN.TILES * NT
    return item // NT, gl.where(inside, item % NT * 8, M), inside


@gluon.jit
def _load_added(added_ptr, first, warp, lane, M, N, stride, PLAN: gl.constexpr):
    """Addends of the sums of a round, of each of a warp's turns."""
    given = ()
    if added_ptr is not None:
        for turn in gl.static_range(_turns(PLAN)):
            tile, token, _ = _item(turn, warp, M, PLAN)
            own = load_added(added_ptr, token, first + tile, lane, M, N, stride, 1, PLAN)
            given = given + (own,)
    return given


@gluon.jit
def _load_units(rows_ptr, first, warp, lane, tiles, PLAN: gl.constexpr):
    """Units of the rows of each of a warp's turns of a round, where sums are integers."""
    units = ()
    for turn in gl.static_range(_turns(PLAN) if PLAN.X.WHOLE else 0):
        tile, _, _ = _item(turn, warp, 0, PLAN)
        units = units + (row_numbers(rows_ptr, gl.minimum(first + tile, tiles - 1), lane),)
    return units


@gluon.jit
def _store_round(
    sums, units, added_ptr, given, out_ptr, first, warp, lane, M, N, stride, factors,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Add the sums of all warps that share a tile, and store them."""
    X: gl.constexpr = PLAN.X
    PARTS: gl.constexpr = PLAN.WARPS // PLAN.GROUPS
    for turn in gl.static_range(_turns(PLAN)):
        tile, token, inside = _item(turn, warp, M, PLAN)
        own = gl.minimum(tile, PLAN.GROUPS * PLAN.TILES - 1)
        at = sums + own * (PARTS * X.TOKENS * 64) + warp % (X.TOKENS // 8) * 512 + lane * 16
        total = ()
        for p in gl.static_range(PARTS):
            words = load_shared16_if(at, inside, p * X.TOKENS * 64)
            more = ()
            for i in gl.static_range(4):
                one = words[i]
                if not X.WHOLE:
                    one = as_float(one)
                more = more + (one if p == 0 else total[i] + one,)
            total = more
        if X.WHOLE:
            total = scaled(total, units[turn])
        added = ()
        if added_ptr is not None:
            added = given[turn]
        store_block(
            total, added_ptr, added, out_ptr, token, first + tile, lane, M, N, stride, factors,
            PLAN, PLAN.SUMMED,
        )  # fmt: skip


def multiply(
    blocks: Tensor,
    M: int,
    w: TiledLinear,
    X: Blocks,
    launch: StreamLaunch,
    *,
    normed: bool = False,
    added: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product of a weight and tokens that `quantize` has left in one block.

    normed: their norm's factors are behind them.

    Returns:
        [M, N] or [M, N / 2]; where two rows are a token [M / 2, N] float32.

    Raises:
        ValueError: more tokens than a block has, or a weight for exact inputs.
    """
    if M > X.TOKENS or w.rows is None:
        raise ValueError(f"{M} tokens for {launch}, of a weight with {w.activations} inputs")
    plan = stream_plan(w.constants, X, launch, w.paired, normed, w.remainders)
    y = w.new_product(M, dtype)
    run(
        _stream_int8_kernel,
        (-(-w.tiles // launch.program_tiles),),
        blocks,
        w.words,
        w.scales.view(torch.int32),
        w.rows,
        None if added is None else added.view(torch.int32),
        y if dtype == torch.float32 else y.view(torch.int32),
        M,
        w.outputs,
        w.tiles,
        0 if added is None or added.shape[0] == 1 else w.outputs,
        PLAN=plan,
        num_warps=launch.warps,
        maxnreg=card_of(blocks).register_cap(REGISTERS),
        launch_pdl=True,
        enable_fp_fusion=True,
    )
    return y


def stream_int8(
    x: Tensor,
    w: TiledLinear,
    launch: StreamLaunch,
    *,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`added + rms_norm(x) @ w.T` with x in eight bits; the arguments are those of `gemm_int8`."""
    bounds = 1 if norm is not None else -(-w.K // (MOST_WARPS * BLOCK_K.value))
    group = activation_group(w.group_size, w.K)
    X = token_blocks(w.K, group, launch.tokens, bounds, whole=w.whole)
    blocks = quantize(x, w.bits, X, norm=norm, squares=squares, eps=eps)
    return multiply(blocks, len(x), w, X, launch, normed=norm is not None, added=added, dtype=dtype)
