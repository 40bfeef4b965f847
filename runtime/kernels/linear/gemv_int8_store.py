"""Device functions of `gemv_int8` that store the results of a round of tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.linear.sums import row_numbers, store_finished, sum_of_parts
from lowbit.runtime.kernels.ptx.memory import load_shared4


@gluon.jit
def result_of(thread, TOKENS: gl.constexpr):
    """Tile of a round, place of its sums, row g and first token of a thread's results."""
    PAIRS: gl.constexpr = (TOKENS + 1) // 2
    slot = thread % (8 * PAIRS)
    return thread // (8 * PAIRS), slot, slot // PAIRS, slot % PAIRS * 2


@gluon.jit
def load_added(added_ptr, result, first_tile, B, N, PLAN: gl.constexpr):
    """Rows of what is added for a thread's results in a round, for each of its turns."""
    tile, _slot, g, token = result
    COLUMNS: gl.constexpr = min(PLAN.X.TOKENS, 2)
    TURNS: gl.constexpr = turns_of_round(PLAN)
    added = ()
    if added_ptr is not None:
        for turn in gl.static_range(TURNS):
            for i in gl.static_range(2 * COLUMNS):
                n = (first_tile + tile + turn * turn_tiles(PLAN)) * 16 + i // COLUMNS * 8 + g
                n = gl.minimum(n, N - 1)
                if PLAN.ADDED_ROWS:
                    n += gl.minimum(token + i % COLUMNS, B - 1) * N
                added = added + (gl.load(added_ptr + n).to(gl.float32),)
    return added


@gluon.jit
def load_units(rows_ptr, result, first_tile, tiles, PLAN: gl.constexpr):
    """Units of a thread's rows g and g + 8, for each of its turns, where sums are integers."""
    tile, _slot, g, _token = result
    units = ()
    for turn in gl.static_range(turns_of_round(PLAN) if PLAN.W.WHOLE else 0):
        own = gl.minimum(first_tile + tile + turn * turn_tiles(PLAN), tiles - 1)
        units = units + (row_numbers(rows_ptr, own, g * 4),)
    return units


@gluon.constexpr_function
def turn_tiles(plan):
    """Tiles of a round whose results all threads of a program have together."""
    return plan.LAUNCH.warps * 32 // (8 * ((plan.X.TOKENS + 1) // 2))


@gluon.constexpr_function
def turns_of_round(plan):
    """Times that a thread makes results of a round."""
    return -(-plan.LAUNCH.tiles * plan.LAUNCH.warp_groups // turn_tiles(plan))


@gluon.jit
def store_round(
    y_ptr, added, units, factor, buffer, sums, result, first_tile, B, N, NORM: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Add the sums of all warps that share a tile, for a round's results, and store them."""
    X: gl.constexpr = PLAN.X
    TILES: gl.constexpr = PLAN.LAUNCH.tiles * PLAN.LAUNCH.warp_groups  # of a round
    COLUMNS: gl.constexpr = min(X.TOKENS, 2)
    PARTS: gl.constexpr = PLAN.LAUNCH.warps // PLAN.LAUNCH.warp_groups
    BYTES: gl.constexpr = PARTS * 64 * X.TOKENS  # of a tile
    tile, slot, g, token = result
    for turn in gl.static_range(turns_of_round(PLAN)):
        own = tile + turn * turn_tiles(PLAN)
        inside = own < TILES
        at = sums + gl.minimum(own, TILES - 1) * BYTES + slot * (8 * COLUMNS)
        y = sum_of_parts(at, PARTS, BYTES // PARTS // (8 * COLUMNS), COLUMNS, PLAN.W.WHOLE)
        for column in gl.static_range(COLUMNS):
            b = token + column
            own_factor = factor
            if NORM and X.TOKENS > 1:
                own_factor = factor * load_shared4(buffer + X.FACTORS + b * 4)
            more = ()
            if len(added) > 0:
                more = (
                    added[turn * 2 * COLUMNS + column],
                    added[(turn * 2 + 1) * COLUMNS + column],
                )
            low = y[column]
            high = y[COLUMNS + column]
            if PLAN.W.WHOLE:
                low = low.to(gl.float32) * units[turn][0]
                high = high.to(gl.float32) * units[turn][1]
            store_finished(
                y_ptr, low, high, own_factor, more, first_tile + own, g, b,
                inside & (b < B), N, PLAN.PAIRED,
            )  # fmt: skip
