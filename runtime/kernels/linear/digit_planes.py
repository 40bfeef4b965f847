"""Device functions of the GEMV: x as digits of 8 bits, so that codes are multiplied as they are.

Codes are signed bytes, or the upper half of one, and tensor cores multiply bytes exactly. So x
becomes numbers of three digits to the base 256, and `integer_mma` takes the digits as columns:

    x[k] = unit * (d0 + 256 * d1 + 65536 * d2)      d0, d1 in -128..127, d2 in -32..32

The unit is 2^-20 of the power of two below the largest of a block of 256 elements, which is what a
warp takes at a time: an element is off by at most 2^-21 of that largest, and one of BF16 above
2^-13 of it is exact. But it is at least 2^-126. NaN and infinities make their block NaN.

A token's digits are three planes of a byte for each k, 2 * d2 in the last; its units are FP32.
Chunks of 8 lie as two steps of `integer_mma` take them, 16 bytes of a lane side by side; in each
the order of k is that of the codes in their words (`tiles`). Of the eight columns of an `mma`

    up to 4 tokens    each half is a token: its digits d0, d1, d2, d2
    8 or 16 tokens    each is a token, and every digit has an `mma` of its own

Integer sums are exact, so it does not matter which columns a token has, nor beside which others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.linear.stage import (
    BLOCK_K,
    SQUARES_BYTES,
    add_squares,
    blocks_of,
    diagonal,
    head_factor,
    place,
    times_gains,
)
from lowbit.runtime.kernels.ptx.memory import (
    load16,
    store_shared4,
    store_shared8,
)
from lowbit.runtime.kernels.ptx.mma import (
    as_float,
    as_word,
    bytes_of,
    high_half,
    larger,
    largest,
    low_half,
    words_where,
)


def plane_bytes(K: int) -> int:
    """From one plane to the next in shared memory: whole steps, and the next in other banks."""
    return -(-K // 128) * 128 + 64


def digit_bytes(K: int, tokens: int = 1) -> int:
    """Shared-memory bytes that hold the planes and units of so many tokens of K elements."""
    return tokens * 3 * plane_bytes(K) + -(-blocks_of(K) * tokens // 4) * 16


@gluon.jit
def digits_of(w, factor, SCALED: gl.constexpr, BITS: gl.constexpr):
    """A lane's chunk of 8 elements as two words for each plane, and the unit of the warp's block.

    factor: what the chunk is multiplied by, where SCALED.
    """
    most = larger(
        larger(w[0] & 0x7FFF7FFF, w[1] & 0x7FFF7FFF),
        larger(w[2] & 0x7FFF7FFF, w[3] & 0x7FFF7FFF),
    )
    most = gl.maximum(most >> 16, most & 0xFFFF)
    if SCALED:
        most = as_word(as_float(most << 16) * factor) >> 16
    # Its exponent; below 21 the unit would not be a normal number, and factors, which are at
    # most 2^10 (eps of 1e-6), must leave the scale finite.
    exponent = gl.maximum(largest(most) >> 7, 31 if SCALED else 21)
    scale = as_float((274 - exponent) << 23)
    if SCALED:
        scale *= factor
    k0, k1 = _fixed(w[0], scale)
    k2, k3 = _fixed(w[1], scale)
    k4, k5 = _fixed(w[2], scale)
    k6, k7 = _fixed(w[3], scale)
    if BITS == 4:
        a = _digits(k0, k4, k1, k5)
        b = _digits(k2, k6, k3, k7)
    else:
        a = _digits(k0, k2, k1, k3)
        b = _digits(k4, k6, k5, k7)
    unit = as_float(gl.where(exponent == 255, 0x7FC00000, (exponent - 20) << 23))
    return ((a[0], b[0]), (a[1], b[1]), (a[2], b[2])), unit


@gluon.jit
def place_of_chunk(chunk, STRIDE: gl.constexpr):
    """Offset of a chunk's 8 bytes in a plane whose blocks of 64 k are STRIDE bytes apart."""
    return chunk // 8 * STRIDE + (chunk % 4 * 16 + chunk // 4 % 2 * 8)


@gluon.jit
def stage_tokens(
    x_ptr, gains, head_squares_ptr, buffer, warp, lane, none, B, eps,
    NORM: gl.constexpr, FP32: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr,
    TOKENS: gl.constexpr, TURNS: gl.constexpr, BITS: gl.constexpr, HEAD: gl.constexpr,
    PLANE: gl.constexpr, SQUARES_AT: gl.constexpr,
):  # fmt: skip
    """Put the digits of all tokens into shared memory, and sums of squares where x is normed.

    B: tokens that are there; the last is repeated beyond.
    """
    BLOCKS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    AHEAD: gl.constexpr = TURNS if TOKENS == 1 or TURNS < 8 else 8  # turns whose loads are issued
    units = buffer + TOKENS * 3 * PLANE
    x = x_ptr.to(gl.int64, bitcast=True)
    for first in gl.static_range(0, TURNS, AHEAD):
        loaded = ()
        squares = ()
        for turn in gl.static_range(first, first + AHEAD if first + AHEAD < TURNS else TURNS):
            token, block = place(turn, warp, K, WARPS, TOKENS)
            chunk = block * 32 + lane
            if K % BLOCK_K != 0 or (turn + 1) * WARPS > TOKENS * BLOCKS:
                chunk = gl.minimum(chunk, K // 8 - 1)  # past the end: the last one again
            if TOKENS == 1:
                loaded = loaded + (load16(x + chunk.to(gl.int64) * 16),)
            else:
                token = gl.minimum(token, B - 1)
                loaded = loaded + (load16(x + (token * (K // 8) + chunk).to(gl.int64) * 16),)
            if HEAD > 0:
                head = token * (K // HEAD) + chunk // (HEAD // 8)
                at = head_squares_ptr.to(gl.int64, bitcast=True) + head.to(gl.int64) * 16
                squares = squares + (load16(at),)
        for turn in gl.static_range(first, first + AHEAD if first + AHEAD < TURNS else TURNS):
            token, block = place(turn, warp, K, WARPS, TOKENS)
            chunk = block * 32 + lane
            inside = chunk < K // 8
            if TOKENS > 1:
                inside = inside & (token < TOKENS)
            w = loaded[turn - first]
            if NORM and (K % BLOCK_K != 0 or (turn + 1) * WARPS > TOKENS * BLOCKS):
                w = words_where(inside, w)
            scaled = w
            if NORM:
                scaled = times_gains(w, gains[turn % len(gains)], FP32)
            factor = none
            if HEAD > 0:
                factor = head_factor(squares[turn - first], eps, HEAD)
            planes, unit = digits_of(scaled, factor, HEAD > 0, BITS)
            here = buffer + place_of_chunk(chunk, 64)
            if TOKENS > 1:
                here += token * (3 * PLANE)
            for plane in gl.static_range(3):
                store_shared8(here + plane * PLANE, planes[plane], inside)
            store_shared4(units + (block * TOKENS + token) * 4, unit, inside & (lane == 0))
            if NORM:
                own, there = diagonal(add_squares((none, none, none, none), w), lane)
                at = buffer + SQUARES_AT + (token * BLOCKS + block) * SQUARES_BYTES
                if (turn + 1) * WARPS > TOKENS * BLOCKS:
                    there = there & (block < BLOCKS)
                    if TOKENS > 1:
                        there = there & (token < TOKENS)
                store_shared4(at + lane // 4 * 4, own, there)


@gluon.jit
def _fixed(pair, scale):
    """Two elements as integers of 22 bits, in the low 24 of two words, 0x408080 too large.

    1.5 * 2^23 + 0x8080 keeps the exponent of the sum, whatever the sign, and the digits unsigned.
    """
    low = low_half(pair) * scale + 12615808.0
    high = high_half(pair) * scale + 12615808.0
    return as_word(low), as_word(high)


@gluon.jit
def _digits(a, b, c, d):
    """Four integers in three planes, as signed bytes."""
    low = bytes_of(a, b, 0x5140)
    high = bytes_of(c, d, 0x5140)
    top = bytes_of(bytes_of(a, b, 0x0062), bytes_of(c, d, 0x0062), 0x5410)
    return (
        bytes_of(low, high, 0x5410) ^ -0x7F7F7F80,
        bytes_of(low, high, 0x7632) ^ -0x7F7F7F80,
        (top << 1) ^ -0x7F7F7F80,  # of 7 bits, 64 too large
    )
