"""The kernel of `gemv` for several tokens, and for the dense rows beside it.

Every program makes all tokens digits in its shared memory, or finds those that `digits` has left in
global memory. A program takes its tiles in rounds: so x becomes digits once for many of them. Where
several programs share a tile, another kernel joins their sums.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.linear.dense import multiply_rows
from lowbit.runtime.kernels.linear.digits import given_factor, stage_tokens
from lowbit.runtime.kernels.linear.norm import load_gains, norm_factor, total_of
from lowbit.runtime.kernels.linear.products import (
    column_of,
    load_steps,
    multiply_rest,
    multiply_steps,
    tile_addresses,
    unit_of,
    zero_sums,
)
from lowbit.runtime.kernels.linear.program import BLOCK_K, SQUARES_BYTES, gain_turns
from lowbit.runtime.kernels.linear.sums import (
    halved,
    leave_sums,
    results_of,
    store_result,
    sum_of_parts,
    tree_sum,
)
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    load16,
    load_shared4,
    shared_memory,
    store_shared4,
)
from lowbit.runtime.kernels.ptx.mma import threads

MOST_UNROLLED = gl.constexpr(24)  # steps of a warp for two tokens; 34 cost 700 bytes of stack


@gluon.jit(do_not_specialize=["B", "N", "tiles"])
def gemv_several_kernel(
    x_ptr, digits_ptr, gain_ptr, head_squares_ptr, words_ptr, scales_ptr, added_ptr, rows_ptr,
    y_ptr, rows_y_ptr, sums_ptr, B, N, tiles, eps, PLAN: gl.constexpr,
):  # fmt: skip
    """See `gemv`; PLAN is a `GemvPlan`.

    digits_ptr: of the kernel `digits`, where x is not staged.
    sums_ptr: for `gemv_join_kernel`, where several programs share a tile.
    """
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    DENSE: gl.constexpr = PLAN.DENSE
    FIRST: gl.constexpr = (PLAN.ROWS + 15) // 16  # programs with dense rows: they take longest
    if PLAN.PDL and PLAN.LAUNCH.early:
        gdc_launch_dependents()
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = shared_memory(PLAN.SHARED, WARPS, N < 0) + zero
    if FIRST > 0 and gl.program_id(0) < FIRST:
        if PLAN.LAUNCH.split == 1 or gl.program_id(1) == 0:
            multiply_rows(
                x_ptr, gain_ptr, rows_ptr, None, rows_y_ptr, buffer,
                (gl.program_id(0), warp, lane, zero_f32), B, PLAN.ROWS, 0, eps, DENSE,
            )  # fmt: skip
        elif PLAN.PDL:
            gdc_wait()
    else:
        _multiply_tiles(
            (x_ptr, digits_ptr, gain_ptr, head_squares_ptr), (words_ptr, scales_ptr), added_ptr,
            y_ptr, sums_ptr, B, N, tiles, eps, buffer, warp, lane, zero_f32, PLAN,
        )  # fmt: skip


@gluon.jit
def _multiply_tiles(
    x_ptrs, weight_ptrs, added_ptr, y_ptr, sums_ptr, B, N, tiles, eps, buffer, warp, lane, zero_f32,
    PLAN: gl.constexpr,
):  # fmt: skip
    x_ptr, digits_ptr, gain_ptr, head_squares_ptr = x_ptrs
    words_ptr, scales_ptr = weight_ptrs
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
    g = lane // 4
    t = lane % 4
    part = warp % EACH
    if SPLIT > 1:
        part += gl.program_id(1) * EACH
    first_tile = (gl.program_id(0) - (PLAN.ROWS + 15) // 16) * (ROUNDS * WARP_GROUPS * TILES)
    at = tile_addresses(
        words_ptr, scales_ptr, first_tile + warp // EACH * TILES, tiles, part, lane, TILES, W
    )
    loaded = load_steps(at, part, 0, AHEAD, PARTS, W)
    gains = ()
    if X.STAGED:
        TURNS: gl.constexpr = gain_turns(X.BLOCKS, X.TOKENS, WARPS)
        gains = load_gains(gain_ptr, warp, lane, TURNS, WARPS, X)
    if PLAN.PDL:
        gdc_wait()
        if not PLAN.LAUNCH.early:
            gdc_launch_dependents()

    # An item is 16 rows and the tokens of a lane's sums: two in turn, or two side by side.
    HALVED: gl.constexpr = halved(X.TOKENS)
    LANES: gl.constexpr = results_of(X.TOKENS)[0]  # with results
    COLUMNS: gl.constexpr = results_of(X.TOKENS)[1]  # tokens of a lane
    NT: gl.constexpr = (X.TOKENS + 1) // 2 if HALVED else X.TOKENS // 8
    ITEMS: gl.constexpr = ROUNDS * WARP_GROUPS * TILES * NT
    held = lane >= 0
    slot = lane
    token = 2 * t
    if HALVED:
        held = t % 2 == 0
        slot = lane // 2
        token = t // 2
    added = ()
    if added_ptr is not None:
        for first in gl.static_range(0, ITEMS, WARPS):
            for i in gl.static_range(2 * COLUMNS):
                n = (first_tile + (first + warp) // NT) * 16 + i // COLUMNS * 8 + g
                n = gl.minimum(n, N - 1)
                if PLAN.ADDED_ROWS:
                    b = (first + warp) % NT * (2 if HALVED else 8) + token + i % COLUMNS
                    n += gl.minimum(b, B - 1) * N
                added = added + (gl.load(added_ptr + n).to(gl.float32),)
    factor = zero_f32 + W.CODEC.FACTOR
    if SPLIT > 1:
        sums_at = sums_ptr.to(gl.int64, bitcast=True) + first_tile * (NT * PARTS * LANES * 16)
    else:
        sums_at = buffer + PLAN.SUMS
    digits = buffer
    if X.STAGED:
        stage_tokens(
            x_ptr, (), gains, head_squares_ptr, buffer, warp, lane, zero_f32, B, eps, PLAN.HEAD,
            W.CODEC.SUBBYTE, WARPS, X,
        )  # fmt: skip
        barrier()
        if NORM:
            leave_factors(buffer, warp, lane, zero_f32, eps, WARPS, X)
    else:
        digits = digits_ptr.to(gl.int64, bitcast=True)
    units = digits + X.UNITS + unit_of(lane, X.TOKENS)
    digits = digits + column_of(lane, X) + part * (W.CODEC.BLOCKS * X.NEXT)
    mixed = gl.where(t % 2 == 0, 256, 0)
    own = (part, mixed, held, slot)
    if ROUNDS == 1:
        loaded = multiply_looped(
            loaded, at, at, digits, units, own, warp // EACH, sums_at, zero_f32, False, AHEAD,
            PARTS, W, X,
        )  # fmt: skip
    else:
        for turn in range(ROUNDS):
            tile = gl.minimum(turn + 1, ROUNDS - 1) * WARP_GROUPS + warp // EACH
            next_at = tile_addresses(
                words_ptr, scales_ptr, first_tile + tile * TILES, tiles, part, lane, TILES, W
            )
            loaded = multiply_looped(
                loaded, at, next_at, digits, units, own, turn * WARP_GROUPS + warp // EACH, sums_at,
                zero_f32, True, AHEAD, PARTS, W, X,
            )  # fmt: skip
            at = next_at
    barrier()
    for first in gl.static_range(0, ITEMS if SPLIT == 1 else 0, WARPS):
        item = first + warp
        here = sums_at + (gl.minimum(item, ITEMS - 1) * PARTS * LANES + slot) * (8 * COLUMNS)
        y = sum_of_parts(here, PARTS, LANES, COLUMNS)  # rows g, then rows g + 8
        for column in gl.static_range(COLUMNS):
            b = item % NT * (2 if HALVED else 8) + token + column
            stored = held & (item < ITEMS) & (b < B)
            own_factor = factor
            if NORM and not X.STAGED:
                own_factor = factor * given_factor(digits_ptr, b, X)
            elif NORM:
                own_factor = factor * load_shared4(buffer + X.FACTORS + b * 4)
            more = ()
            if added_ptr is not None:
                more = (
                    added[first // WARPS * 2 * COLUMNS + column],
                    added[(first // WARPS * 2 + 1) * COLUMNS + column],
                )
            store_result(
                y_ptr, y[column] * own_factor, y[COLUMNS + column] * own_factor, more,
                first_tile + item // NT, g, b, stored, N, PLAN.PAIRED,
            )  # fmt: skip


@gluon.jit
def leave_factors(
    buffer, warp, lane, zero_f32, eps, WARPS: gl.constexpr, X: gl.constexpr,
    WHOLE: gl.constexpr = False,
):  # fmt: skip
    """Put the factor of each token's norm, or that times its scale, behind the sums of squares."""
    for turn in gl.static_range((X.TOKENS + WARPS - 1) // WARPS):
        b = gl.minimum(turn * WARPS + warp, X.TOKENS - 1)
        at = buffer + X.SQUARES + b * (X.BLOCKS * SQUARES_BYTES)
        factor = norm_factor(total_of(at, lane, zero_f32, X), eps, X.K)
        if WHOLE:
            factor *= load_shared4(buffer + X.SCALES + b * 4)
        store_shared4(buffer + X.FACTORS + b * 4, factor, lane == 0)


@gluon.jit
def multiply_looped(
    loaded, at, next_at, digits, units, own, share, sums_at, zero_f32, NEXT: gl.constexpr,
    AHEAD: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """`multiply_round` of several tokens, with a loop where every turn is like the others.

    What the compiler would load early of an unrolled one does not fit into registers. Steps that
    only some warps have follow.
    """
    OWN: gl.constexpr = (W.STEPS + PARTS - 1) // PARTS
    STEP_K: gl.constexpr = W.CODEC.STEP_K
    TURN_K: gl.constexpr = AHEAD * PARTS * STEP_K
    EVEN: gl.constexpr = TURN_K % BLOCK_K == 0 and TURN_K % W.G == 0 and W.K % STEP_K == 0
    ALL: gl.constexpr = W.STEPS % PARTS == 0 and OWN % AHEAD == 0  # are in the loop
    MOST: gl.constexpr = OWN // AHEAD if ALL else W.STEPS // PARTS // AHEAD - 1
    LOOP: gl.constexpr = X.TOKENS >= 4 or OWN > MOST_UNROLLED
    TURNS: gl.constexpr = MOST if LOOP and EVEN and OWN > AHEAD else 0
    GROUP_BYTES: gl.constexpr = 64 if W.SCALES == "fp32" else 32
    acc = zero_sums(zero_f32, len(at[0]), X.TOKENS)
    if TURNS > 0:
        words, scales = at
        next_words, next_scales = next_at
        for turn in range(TURNS):
            words_at = ()
            scales_at = ()
            for r in gl.static_range(len(words)):
                own_words = words[r] + (turn + 1) * (AHEAD * PARTS * W.CODEC.STEP_BYTES)
                own_scales = scales[r] + (turn + 1) * (TURN_K // W.G * GROUP_BYTES)
                if ALL:
                    last = turn + 1 + own[0] * 0 == TURNS
                    own_words = gl.where(last, next_words[r], own_words)
                    own_scales = gl.where(last, next_scales[r], own_scales)
                words_at = words_at + (own_words,)
                scales_at = scales_at + (own_scales,)
            next_loaded = load_steps((words_at, scales_at), own[0], 0, AHEAD, PARTS, W)
            acc = multiply_steps(
                acc, loaded, digits + turn * (TURN_K // 64 * X.NEXT),
                units + turn * (TURN_K // BLOCK_K * X.TOKENS * 4), own[0], own[1], 0, AHEAD, PARTS,
                W, X,
            )  # fmt: skip
            loaded = next_loaded
    acc, loaded = multiply_rest(
        acc, loaded, at, next_at, digits, units, own, TURNS * AHEAD if TURNS > 0 else 0, NEXT,
        AHEAD, PARTS, W, X,
    )  # fmt: skip
    leave_sums(acc, own, share, sums_at, PARTS, X)
    return loaded


@gluon.jit(do_not_specialize=["B", "N", "tiles"])
def gemv_join_kernel(
    sums_ptr, digits_ptr, added_ptr, y_ptr, B, N, tiles, NORM: gl.constexpr, WARPS: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Join the sums of tiles that several programs share, as one program does it.

    A warp takes 16 rows and 8 tokens.

    sums_ptr: [tiles, TOKENS / 8, JOINED, 32 lanes, 4] float32.
    """
    X: gl.constexpr = PLAN.X
    PARTS: gl.constexpr = PLAN.JOINED
    NT: gl.constexpr = X.TOKENS // 8
    warp, lane, _, zero_f32 = threads(WARPS)
    item = gl.program_id(0) * WARPS + warp
    tile = item // NT
    inside = tile < tiles
    g = lane // 4
    first = item % NT * 8 + lane % 4 * 2  # of the lane's two tokens
    if PLAN.PDL:
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
            if PLAN.ADDED_ROWS:
                n += gl.minimum(first + i % 2, B - 1) * N
            added = added + (gl.load(added_ptr + n).to(gl.float32),)
    y = tree_sum(loaded, 4)
    factor = zero_f32 + PLAN.W.CODEC.FACTOR
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
            PLAN.PAIRED,
        )  # fmt: skip
