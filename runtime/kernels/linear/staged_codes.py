"""Device functions for x in eight bits in a program's shared memory: put there, and read again."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.linear.digits import place_of_chunk
from lowbit.runtime.kernels.linear.norm import (
    add_squares,
    diagonal,
    head_factor,
    place,
    times_gains,
)
from lowbit.runtime.kernels.linear.program import BLOCK_K, SQUARES_BYTES, turns_of
from lowbit.runtime.kernels.linear.rounding import (
    LEAST_PEAK,
    codes_of,
    group_bound,
    peak_of,
    rounded_chunk,
    scale_of,
)
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    load16,
    load_shared4,
    load_shared8,
    load_shared16,
    store_shared4,
    store_shared8,
)
from lowbit.runtime.kernels.ptx.mma import as_float, as_word, largest, quotient, words_where

MOST_KEPT = gl.constexpr(8)  # blocks of a warp that stay in its registers


@gluon.jit
def stage_codes(
    x_ptr, gains, head_squares_ptr, buffer, warp, lane, zero_f32, B, eps,
    HEAD: gl.constexpr, SUBBYTE: gl.constexpr, WARPS: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """Put codes and scales of all tokens into shared memory, with the arguments of `stage_tokens`.

    X: `Codes`.
    """
    NORM: gl.constexpr = len(gains) > 0
    K: gl.constexpr = X.K
    ALL: gl.constexpr = X.TOKENS * X.BLOCKS
    TURNS: gl.constexpr = turns_of(ALL, WARPS)
    AHEAD: gl.constexpr = TURNS if X.TOKENS == 1 or TURNS < 8 else 8  # turns whose loads are issued
    x = x_ptr.to(gl.int64, bitcast=True)
    for first in gl.static_range(0, TURNS, AHEAD):
        loaded = ()
        squares = ()
        for turn in gl.static_range(first, first + AHEAD if first + AHEAD < TURNS else TURNS):
            token, block = place(turn, warp, WARPS, X)
            chunk = block * 32 + lane
            if K % BLOCK_K != 0 or (turn + 1) * WARPS > ALL:
                chunk = gl.minimum(chunk, K // 8 - 1)  # past the end: the last one again
            if X.TOKENS == 1:
                loaded = loaded + (load16(x + chunk.to(gl.int64) * 16),)
            else:
                token = gl.minimum(token, B - 1)
                loaded = loaded + (load16(x + (token * (K // 8) + chunk).to(gl.int64) * 16),)
            if HEAD > 0:
                head = token * (K // HEAD) + chunk // (HEAD // 8)
                at = head_squares_ptr.to(gl.int64, bitcast=True) + head.to(gl.int64) * 16
                squares = squares + (load16(at),)
        for turn in gl.static_range(first, first + AHEAD if first + AHEAD < TURNS else TURNS):
            token, block = place(turn, warp, WARPS, X)
            chunk = block * 32 + lane
            inside = chunk < K // 8
            if X.TOKENS > 1:
                inside = inside & (token < X.TOKENS)
            w = loaded[turn - first]
            if K % BLOCK_K != 0 or (turn + 1) * WARPS > ALL:
                w = words_where(inside, w)
            scaled = w
            if NORM:
                scaled = times_gains(w, gains[turn % len(gains)])
            factor = zero_f32
            if HEAD > 0:
                factor = head_factor(squares[turn - first], eps, HEAD)
            codes, scale, units = codes_of(scaled, factor, lane, HEAD > 0, SUBBYTE, X.GROUP)
            store_shared8(buffer + token * X.TOKEN + place_of_chunk(chunk, 64), codes, inside)
            group = chunk // (X.GROUP // 8)
            starts = inside & (chunk % (X.GROUP // 8) == 0)
            at = buffer + (group * X.TOKENS + token) * 4
            store_shared4(at + X.SCALES, as_float(scale), starts)
            if X.TOKENS == 1:  # nothing waits for it here
                units = group_bound(scale, units)
            store_shared4(at + X.GROUP_SQUARES, as_float(units), starts)
            if NORM:
                no_sums = (zero_f32, zero_f32, zero_f32, zero_f32)
                own, there = diagonal(add_squares(no_sums, w), lane)
                at = buffer + X.SQUARES + (token * X.BLOCKS + block) * SQUARES_BYTES
                if (turn + 1) * WARPS > ALL:
                    there = there & (block < X.BLOCKS)
                    if X.TOKENS > 1:
                        there = there & (token < X.TOKENS)
                store_shared4(at + lane // 4 * 4, own, there)


@gluon.jit
def stage_whole(
    x_ptr, gains, buffer, warp, lane, zero_f32, B, SUBBYTE: gl.constexpr, WARPS: gl.constexpr,
    X: gl.constexpr,
):  # fmt: skip
    """`stage_codes` of normed tokens with one scale each, in the places of their first groups'.

    What few turns have loaded stays in registers, else it is loaded again. Largest elements of
    blocks lie where squares of groups would.
    """
    TURNS: gl.constexpr = turns_of(X.TOKENS * X.BLOCKS, WARPS)
    KEPT: gl.constexpr = TURNS <= MOST_KEPT
    BLOCKS: gl.constexpr = X.BLOCKS
    peaks = buffer + X.GROUP_SQUARES
    loaded = ()
    for turn in gl.static_range(TURNS if KEPT else 0):
        loaded = loaded + (_load_block(x_ptr, turn, warp, lane, B, WARPS, X),)
    gained = ()
    for turn in gl.static_range(TURNS):
        token, block, inside, w = _block_of(x_ptr, loaded, turn, warp, lane, B, WARPS, X)
        own, there = diagonal(add_squares((zero_f32, zero_f32, zero_f32, zero_f32), w), lane)
        at = buffer + X.SQUARES + (token * BLOCKS + block) * SQUARES_BYTES
        store_shared4(at + lane // 4 * 4, own, there & inside)
        w = times_gains(w, gains[turn % len(gains)])
        most = largest(peak_of(w))
        store_shared4(peaks + (token * BLOCKS + block) * 4, as_float(most), (lane == 0) & inside)
        if KEPT:
            gained = gained + (w,)
    barrier()
    most = _largest_of(buffer, warp * 0, lane, X)
    for turn in gl.static_range(TURNS):
        token, block, inside, w = _block_of(x_ptr, gained, turn, warp, lane, B, WARPS, X)
        if not KEPT:
            w = times_gains(w, gains[turn % len(gains)])
        if X.TOKENS > 1:
            most = _largest_of(buffer, gl.minimum(token, X.TOKENS - 1), lane, X)
        inverse = quotient(127.0, as_float(gl.maximum(most, LEAST_PEAK)))
        codes = rounded_chunk(w, zero_f32, inverse, False, SUBBYTE)
        chunk = block * 32 + lane
        at = buffer + token * X.TOKEN + place_of_chunk(chunk, 64)
        store_shared8(at, codes, inside & (chunk < X.K // 8))
        at = buffer + X.SCALES + token * 4
        store_shared4(at, scale_of(most), (lane == 0) & inside & (block == 0))


@gluon.jit
def _largest_of(buffer, token, lane, X: gl.constexpr):
    """The largest |element| of a token, as the word of an FP32, by those of its blocks."""
    BLOCKS: gl.constexpr = X.BLOCKS
    most = lane * 0
    for first in gl.static_range(0, BLOCKS, 32):
        other = gl.minimum(first + lane, BLOCKS - 1)
        at = buffer + X.GROUP_SQUARES + (token * BLOCKS + other) * 4
        most = gl.maximum(most, as_word(load_shared4(at)))
    return largest(most)


@gluon.jit
def _load_block(
    x_ptr, turn: gl.constexpr, warp, lane, B, WARPS: gl.constexpr, X: gl.constexpr
):  # fmt: skip
    """A lane's chunk of a turn's block; past the end another one."""
    token, block = place(turn, warp, WARPS, X)
    chunk = gl.minimum(block * 32 + lane, X.K // 8 - 1)
    row = gl.minimum(token, B - 1)
    x = x_ptr.to(gl.int64, bitcast=True)
    return load16(x + (row * (X.K // 8) + chunk).to(gl.int64) * 16)


@gluon.jit
def _block_of(
    x_ptr, loaded, turn: gl.constexpr, warp, lane, B, WARPS: gl.constexpr, X: gl.constexpr
):  # fmt: skip
    """Token and block of a turn, whether there is one, and the lane's chunk, zeros past the end."""
    token, block = place(turn, warp, WARPS, X)
    inside = (token < X.TOKENS) & (block < X.BLOCKS)
    if turn < len(loaded):
        w = loaded[turn]
    else:
        w = _load_block(x_ptr, turn, warp, lane, B, WARPS, X)
    return token, block, inside, words_where(inside & (block * 32 + lane < X.K // 8), w)


@gluon.jit
def staged_bound(buffer, token, lane, X: gl.constexpr):
    """The bound of a token that `stage_codes` has staged, in every lane."""
    GROUPS: gl.constexpr = X.GROUPS
    most = lane * 0
    for first in gl.static_range(0, GROUPS, 32):
        group = gl.minimum(first + lane, GROUPS - 1)
        at = buffer + (group * X.TOKENS + token) * 4
        word = as_word(load_shared4(at + X.GROUP_SQUARES))
        if X.TOKENS > 1:
            word = group_bound(as_word(load_shared4(at + X.SCALES)), word)
        most = gl.maximum(most, word)
    return as_float(largest(most))


@gluon.jit
def leave_bounds(buffer, warp, lane, WARPS: gl.constexpr, X: gl.constexpr):
    """Put the bound of each token that `stage_codes` has staged into its place."""
    for turn in gl.static_range((X.TOKENS + WARPS - 1) // WARPS):
        token = gl.minimum(turn * WARPS + warp, X.TOKENS - 1)
        bound = staged_bound(buffer, token, lane, X)
        store_shared4(buffer + X.BOUNDS + token * 4, bound, lane == 0)


@gluon.jit
def is_inside(
    part, c: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr,
    X: gl.constexpr,
):  # fmt: skip
    """1 for a group of the warp's step c, and 0 past the last one."""
    GROUPS: gl.constexpr = W.CODEC.STEP_K // X.GROUP
    if (c + 1) * PARTS * GROUPS <= X.GROUPS:
        found = 1
    else:
        found = ((part + c * PARTS) * GROUPS + GROUP < X.GROUPS).to(gl.int32)
    return (found,)


@gluon.jit
def token_scales(
    scales, part, c: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr,
    X: gl.constexpr,
):  # fmt: skip
    """Scales of the lane's tokens in a group of the warp's step c; 0 past the last group.

    scales: address of those in the first group of all.
    """
    GROUPS: gl.constexpr = W.CODEC.STEP_K // X.GROUP  # of a step
    BYTES: gl.constexpr = X.TOKENS * 4
    WHOLE: gl.constexpr = (c + 1) * PARTS * GROUPS <= X.GROUPS  # for every warp
    group = (part + c * PARTS) * GROUPS + GROUP
    if WHOLE:
        at = scales + part * (GROUPS * BYTES)
    else:
        at = scales + gl.minimum(group, X.GROUPS - 1) * BYTES
    OFFSET: gl.constexpr = (c * PARTS * GROUPS + GROUP) * BYTES if WHOLE else 0
    if X.TOKENS == 1:
        loaded = (load_shared4(at, OFFSET),)
    else:
        pair = load_shared8(at, OFFSET)
        loaded = (as_float(pair[0]), as_float(pair[1]))
    found = ()
    for i in gl.static_range(len(loaded)):
        found = found + (loaded[i] if WHOLE else gl.where(group < X.GROUPS, loaded[i], 0.0),)
    return found


@gluon.jit
def columns_of(
    codes, part, c: gl.constexpr, OFFSET: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """16 bytes of this lane's column in the warp's step c: what it multiplies in two products."""
    if (c + 1) * PARTS <= W.STEPS:
        found = load_shared16(codes, c * PARTS * W.CODEC.STEP_K + OFFSET)
    else:
        step = gl.minimum(part + c * PARTS, W.STEPS - 1) - part
        found = load_shared16(codes + step * W.CODEC.STEP_K, OFFSET)
    return found
