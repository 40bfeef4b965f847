"""Device functions that put tokens in eight bits into shared memory, as `Int8Rows` has them.

Rows are rounded here (`codes_of`), or copied from what `quantize` has left in global memory: codes,
scales, factors and bounds have the same bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.linear.norm import add_squares, diagonal, times_gains
from lowbit.runtime.kernels.linear.program import SQUARES_BYTES, STEP_K, turns_of
from lowbit.runtime.kernels.linear.rounding import codes_of, group_bound
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    commit_copies,
    copy4,
    copy16,
    load16,
    load_shared4,
    store_shared4,
    wait_copies,
)
from lowbit.runtime.kernels.ptx.mma import as_float, as_word, largest, words_where

AT_ONCE = gl.constexpr(4)  # blocks of a warp that are on their way


@gluon.jit
def round_token(
    x, gains, buffer, squares_at, warp, lane, zero_f32, WARPS: gl.constexpr, B: gl.constexpr
):  # fmt: skip
    """Round a token times its gains, and leave its sums of squares.

    x: address of the token. gains: of `load_gains`. squares_at: of `total_of`.
    """
    SUBBYTE: gl.constexpr = B.W.CODEC.SUBBYTE
    TURNS: gl.constexpr = turns_of(B.BLOCKS, WARPS)
    loaded = ()
    for turn in gl.static_range(TURNS):
        chunk = gl.minimum((turn * WARPS + warp) * 32 + lane, B.K // 8 - 1)
        loaded = loaded + (load16(x + chunk.to(gl.int64) * 16),)
    for turn in gl.static_range(TURNS):
        block = turn * WARPS + warp
        chunk = block * 32 + lane
        w = words_where(chunk < B.K // 8, loaded[turn])
        own, there = diagonal(add_squares((zero_f32, zero_f32, zero_f32, zero_f32), w), lane)
        at = squares_at + block * SQUARES_BYTES + lane // 4 * 4
        store_shared4(at, own, there & (block < B.BLOCKS))
        rounded = codes_of(times_gains(w, gains[turn]), zero_f32, lane, False, SUBBYTE, B.GROUP)
        _store_chunk(buffer, rounded, warp * 0, chunk, B)


@gluon.jit
def round_rows(
    x, rows, buffer, warp, lane, zero_f32, WARPS: gl.constexpr, B: gl.constexpr
):  # fmt: skip
    """Round rows [rows, K] of BF16 that lie side by side; the last again for those beyond.

    x: address of the first.
    """
    SUBBYTE: gl.constexpr = B.W.CODEC.SUBBYTE
    TURNS: gl.constexpr = turns_of(B.ROWS * B.BLOCKS, WARPS)
    for first in gl.static_range(0, TURNS, AT_ONCE):
        loaded = ()
        for turn in gl.static_range(first, min(first + AT_ONCE, TURNS)):
            unit = turn * WARPS + warp
            row = gl.minimum(unit // B.BLOCKS, rows - 1)
            chunk = gl.minimum(unit % B.BLOCKS * 32 + lane, B.K // 8 - 1)
            loaded = loaded + (load16(x + (row * (B.K // 8) + chunk).to(gl.int64) * 16),)
        for turn in gl.static_range(first, min(first + AT_ONCE, TURNS)):
            unit = turn * WARPS + warp
            chunk = unit % B.BLOCKS * 32 + lane
            w = words_where(chunk < B.K // 8, loaded[turn - first])
            rounded = codes_of(w, zero_f32, lane, False, SUBBYTE, B.GROUP)
            _store_chunk(buffer, rounded, unit // B.BLOCKS, chunk, B)


@gluon.jit
def _store_chunk(buffer, rounded, row, chunk, B: gl.constexpr):
    """Store eight codes of a row, and the scale and the bound of a group that they begin."""
    codes, scale, units = rounded
    inside = (chunk < B.WIDTH // 8) & (row < B.ROWS)
    at = buffer + row * B.ROW + chunk // 4 * 32 + chunk % 4 * 4
    store_shared4(at, as_float(codes[0]), inside)
    store_shared4(at + 16, as_float(codes[1]), inside)
    group = chunk // (B.GROUP // 8)
    at = buffer + _place(row, group, B) * 4
    starts = inside & (chunk % (B.GROUP // 8) == 0)
    store_shared4(at + B.SCALES, as_float(scale), starts)
    store_shared4(at + B.GROUP_BOUNDS, as_float(group_bound(scale, units)), starts)


@gluon.jit
def bound_of(buffer, row, lane, B: gl.constexpr):
    """The bound of a row that was rounded into shared memory, in every lane."""
    GROUPS: gl.constexpr = B.GROUPS
    most = lane * 0
    for first in gl.static_range(0, GROUPS, 32):
        group = gl.minimum(first + lane, GROUPS - 1)
        word = as_word(load_shared4(buffer + B.GROUP_BOUNDS + _place(row, group, B) * 4))
        most = gl.maximum(most, word)
    return as_float(largest(most))


@gluon.jit
def leave_bounds(bounds_at, buffer, warp, lane, WARPS: gl.constexpr, B: gl.constexpr):
    """Store the bounds of all rows, whose scales lie in shared memory, for the whole program."""
    TURNS: gl.constexpr = turns_of(B.ROWS, WARPS)
    for turn in gl.static_range(TURNS):
        row = turn * WARPS + warp
        bound = bound_of(buffer, gl.minimum(row, B.ROWS - 1), lane, B)
        store_shared4(bounds_at + row * 4, bound, (lane == 0) & (row < B.ROWS))
    barrier()


@gluon.jit
def _place(row, group, B: gl.constexpr):
    """Number of a row's scale of a group among all scales."""
    if B.TOKENS > 1:
        place = group * B.TOKENS + row
    else:
        place = row * B.GROUPS + group
    return place


@gluon.jit
def copy_rows(
    given_ptr, given_blocks, numbers_at, rows, buffer, thread, zero, WARPS: gl.constexpr,
    B: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """Copy some rows of what `quantize` has left in blocks of 8 tokens, and wait for them.

    given_blocks: of 8 tokens. numbers_at: address in shared memory of the number of each row.
    X: places of the rows in global memory.
    """
    THREADS: gl.constexpr = WARPS * 32
    CHUNKS: gl.constexpr = X.STEPS * (STEP_K // 16)  # of 16 bytes
    EACH: gl.constexpr = STEP_K // B.GROUP  # groups of a step
    LAST: gl.constexpr = X.STEPS * EACH - 1
    GROUPS: gl.constexpr = B.GROUPS
    given = given_ptr.to(gl.int64, bitcast=True) + zero.to(gl.int64)
    for turn in range(0, (rows * CHUNKS + (THREADS - 1)) // THREADS):
        n = gl.minimum(turn * THREADS + thread, rows * CHUNKS - 1)
        row = n // CHUNKS
        chunk = n % CHUNKS
        number = as_word(load_shared4(numbers_at + row * 4))
        block = (chunk // 8 * given_blocks + number // 8).to(gl.int64)
        part = number % 8 * STEP_K + (chunk ^ number) % 8 * 16
        copy16(buffer + row * B.ROW + chunk * 16, given + block * X.SIZE + part)
    for turn in range(0, (rows * GROUPS + (THREADS - 1)) // THREADS):
        n = gl.minimum(turn * THREADS + thread, rows * GROUPS - 1)
        row = n // GROUPS
        group = gl.minimum(n % GROUPS, LAST)  # past the end the last one again
        number = as_word(load_shared4(numbers_at + row * 4))
        block = (group // EACH * given_blocks + number // 8).to(gl.int64)
        part = X.SCALES + (group % EACH * 8 + number % 8) * 4
        scale_at = buffer + B.SCALES + _place(row, n % GROUPS, B) * 4
        copy4(scale_at, given + block * X.SIZE + part)
    commit_copies()
    wait_copies(0)
    barrier()
