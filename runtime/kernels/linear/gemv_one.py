"""The kernel of `gemv` for one token, and for the dense rows beside it.

Every program makes x digits in its shared memory, in three of the eight columns of a product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.linear.dense import multiply_rows
from lowbit.runtime.kernels.linear.digits import stage_tokens
from lowbit.runtime.kernels.linear.norm import load_gains, norm_factor, total_of
from lowbit.runtime.kernels.linear.products import (
    column_of,
    load_steps,
    multiply_round,
    tile_addresses,
    unit_of,
)
from lowbit.runtime.kernels.linear.program import gain_turns
from lowbit.runtime.kernels.linear.sums import (
    join_programs,
    own_part,
    store_result,
    sum_of_parts,
)
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    shared_memory,
)
from lowbit.runtime.kernels.ptx.mma import as_word, threads
from lowbit.runtime.kernels.ptx.peers import PACKET, push_word

NARROW = gl.constexpr(80)  # registers of a thread that leave none for a norm beside the products


@gluon.jit(do_not_specialize=["N", "tiles"])
def gemv_one_kernel(
    x_ptr, gain_ptr, head_squares_ptr, words_ptr, scales_ptr, added_ptr, rows_ptr, y_ptr,
    rows_y_ptr, sums_ptr, arrived_ptr, peers_ptr, numbers_ptr, N, tiles, eps, PLAN: gl.constexpr,
):  # fmt: skip
    """See `gemv`; PLAN is a `GemvPlan`.

    sums_ptr, arrived_ptr: where several programs share a tile: room for their sums, and how many of
        them have left theirs.
    peers_ptr, numbers_ptr: see `gemv_pushed`, whose result goes there in place of y.
    """
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    DENSE: gl.constexpr = PLAN.DENSE
    FIRST: gl.constexpr = (PLAN.ROWS + 15) // 16  # programs with dense rows: they take longest
    if PLAN.PDL and PLAN.LAUNCH.early:
        gdc_launch_dependents()
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = shared_memory(PLAN.SHARED, WARPS, N < 0) + zero
    if FIRST > 0 and gl.program_id(0) < FIRST:
        multiply_rows(
            x_ptr, gain_ptr, rows_ptr, None, rows_y_ptr, buffer,
            (gl.program_id(0), warp, lane, zero_f32), 1, PLAN.ROWS, 0, eps, DENSE,
        )  # fmt: skip
    else:
        _multiply_tiles(
            x_ptr, gain_ptr, head_squares_ptr, words_ptr, scales_ptr, added_ptr, y_ptr,
            (sums_ptr, arrived_ptr), (peers_ptr, numbers_ptr), N, tiles, eps, buffer, warp, lane,
            zero_f32, PLAN,
        )  # fmt: skip


@gluon.jit
def _multiply_tiles(
    x_ptr, gain_ptr, head_squares_ptr, words_ptr, scales_ptr, added_ptr, y_ptr, shared_ptrs,
    pushed_ptrs, N, tiles, eps, buffer, warp, lane, zero_f32, PLAN: gl.constexpr,
):  # fmt: skip
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    TILES: gl.constexpr = PLAN.LAUNCH.tiles
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    WARP_GROUPS: gl.constexpr = PLAN.LAUNCH.warp_groups
    ROUNDS: gl.constexpr = PLAN.LAUNCH.rounds
    SPLIT: gl.constexpr = PLAN.LAUNCH.split
    EACH: gl.constexpr = WARPS // WARP_GROUPS  # warps of a program that share a tile
    PARTS: gl.constexpr = EACH * SPLIT  # of a tile's steps
    OWN: gl.constexpr = (W.STEPS + PARTS - 1) // PARTS  # steps of a warp
    AHEAD: gl.constexpr = min(PLAN.LAUNCH.steps, OWN)
    NORM: gl.constexpr = gain_ptr is not None
    LATE: gl.constexpr = PLAN.LAUNCH.registers is not None and PLAN.LAUNCH.registers <= NARROW
    program = gl.program_id(0) - (PLAN.ROWS + 15) // 16
    g = lane // 4
    t = lane % 4
    part = warp % EACH
    split = 0
    if SPLIT > 1:
        split = gl.program_id(1)
        part += split * EACH
    first_tile = program * (ROUNDS * WARP_GROUPS * TILES)
    at = tile_addresses(
        words_ptr, scales_ptr, first_tile + warp // EACH * TILES, tiles, part, lane, TILES, W
    )
    loaded = load_steps(at, part, 0, AHEAD, PARTS, W)
    gains = load_gains(gain_ptr, warp, lane, gain_turns(X.BLOCKS, 1, WARPS), WARPS, X)
    if PLAN.PDL:
        gdc_wait()
        if not PLAN.LAUNCH.early:
            gdc_launch_dependents()
    if PLAN.RANKS > 0:  # behind the wait: the exchange before has counted itself
        number = gl.load(pushed_ptrs[1] + lane * 0) + 1
    ITEMS: gl.constexpr = ROUNDS * WARP_GROUPS * TILES  # of 16 rows
    held = t == 0
    added = ()
    if added_ptr is not None:
        for first in gl.static_range(0, ITEMS, WARPS):
            for half in gl.static_range(2):
                n = (first_tile + (first + warp)) * 16 + half * 8 + g
                added = added + (gl.load(added_ptr + gl.minimum(n, N - 1)).to(gl.float32),)
    factor = zero_f32 + W.CODEC.FACTOR
    sums_at = buffer + PLAN.SUMS
    stage_tokens(
        x_ptr, (), gains, head_squares_ptr, buffer, warp, lane, zero_f32, 1, eps, PLAN.HEAD,
        W.CODEC.SUBBYTE, WARPS, X, split,
    )  # fmt: skip
    barrier()
    if NORM and not LATE:  # before the products, which hide it
        factor *= norm_factor(total_of(buffer + X.SQUARES, lane, zero_f32, X), eps, W.K)
    units = buffer + X.UNITS + unit_of(lane, 1)
    digits = buffer + column_of(lane, X) + own_part(part, PARTS, X) * (W.CODEC.BLOCKS * X.NEXT)
    mixed = gl.where(t % 2 == 0, 256, 0)
    own = (part, mixed, held, g)
    if ROUNDS > 1:
        for turn in range(ROUNDS - 1):
            share = turn * WARP_GROUPS + warp // EACH
            tile = first_tile + (share + WARP_GROUPS) * TILES
            next_at = tile_addresses(words_ptr, scales_ptr, tile, tiles, part, lane, TILES, W)
            loaded = multiply_round(
                loaded, at, next_at, digits, units, own, share, sums_at, zero_f32, True, AHEAD,
                PARTS, W, X,
            )  # fmt: skip
            at = next_at
    multiply_round(
        loaded, at, at, digits, units, own, (ROUNDS - 1) * WARP_GROUPS + warp // EACH, sums_at,
        zero_f32, False, AHEAD, PARTS, W, X,
    )  # fmt: skip
    if NORM and LATE:
        factor *= norm_factor(total_of(buffer + X.SQUARES, lane, zero_f32, X), eps, W.K)
    barrier()
    for first in gl.static_range(0, ITEMS, WARPS):
        item = first + warp
        here = sums_at + (gl.minimum(item, ITEMS - 1) * EACH * 8 + g) * 8
        y = sum_of_parts(here, EACH, 8, 1)  # rows g and g + 8
        last = item < ITEMS
        if SPLIT > 1:
            inside = last & (first_tile + item < tiles)
            y, last = join_programs(
                y, shared_ptrs, first_tile + item, split, g, inside, SPLIT, held
            )
        more = ()
        if added_ptr is not None:
            more = (added[first // WARPS * 2], added[first // WARPS * 2 + 1])
        if PLAN.RANKS > 0:
            _push_result(
                pushed_ptrs[0], number, y[0] * factor, y[1] * factor, first_tile + item, g,
                held & last, N, PLAN,
            )  # fmt: skip
        else:
            store_result(
                y_ptr, y[0] * factor, y[1] * factor, more, first_tile + item, g, lane * 0,
                held & last, N, PLAN.PAIRED,
            )  # fmt: skip


@gluon.jit
def _push_result(
    peers_ptr, number, low, high, tile, g, stored, N, PLAN: gl.constexpr
):  # fmt: skip
    """Push rows g and g + 8 of a tile into the buffers of all ranks, this one's too."""
    RANKS: gl.constexpr = PLAN.RANKS
    half = (number & 1) * RANKS + PLAN.RANK
    for i in gl.static_range(2):
        n = tile * 16 + i * 8 + g
        at = (half * PLAN.MOST_PUSHED + n).to(gl.int64) * PACKET
        for rank in gl.static_range(RANKS):
            v = low if i == 0 else high
            push_word(gl.load(peers_ptr + rank) + at, as_word(v), number, stored & (n < N))
