"""Device functions of the GEMV: x times the gain of a norm, factors of heads, sums of a program."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.access import load16, load_shared4, load_shared8, load_shared16
from lowbit.runtime.kernels.mma import (
    across,
    as_float,
    bf16_pair,
    high_half,
    low_half,
    mma,
    times,
    words_where,
)

SQUARES = 4  # parts of the sum of a head's squares, which are one load


@gluon.jit
def load_gains(gain_ptr, at, K: gl.constexpr, STRIDE: gl.constexpr):
    """The gains of the chunks that this thread stages, as stored: nothing waits for them here."""
    gains = ()
    if gain_ptr is not None:
        for first in gl.static_range(0, K // 8, STRIDE):
            chunk = gl.minimum(first + at, K // 8 - 1).to(gl.int64)
            if gain_ptr.dtype.element_ty == gl.float32:
                base = gain_ptr.to(gl.int64, bitcast=True) + chunk * 32
                gains = gains + (load16(base) + load16(base + 16),)
            else:
                gains = gains + (load16(gain_ptr.to(gl.int64, bitcast=True) + chunk * 16),)
    return gains


@gluon.jit
def head_factors(squares_ptr, at, eps, K: gl.constexpr, STRIDE: gl.constexpr, HEAD: gl.constexpr):
    """The norm's factor for each of this thread's chunks: of the head of HEAD elements it is in."""
    loaded = ()
    for first in gl.static_range(0, K // 8, STRIDE):
        head = gl.minimum(first + at, K // 8 - 1) // (HEAD // 8)
        loaded = loaded + (load16(squares_ptr.to(gl.int64, bitcast=True) + head.to(gl.int64) * 16),)
    factors = ()
    for first in gl.static_range(0, K // 8, STRIDE):
        s = loaded[first // STRIDE]
        square = as_float(s[0]) + as_float(s[1]) + (as_float(s[2]) + as_float(s[3]))
        factors = factors + (gl.rsqrt(square / HEAD + eps),)
    return factors


@gluon.jit
def _times(words, gains, FP32: gl.constexpr):
    """Eight elements times their gains, each product rounded once."""
    out = ()
    for j in gl.static_range(4):
        if FP32:
            low = low_half(words[j]) * as_float(gains[2 * j])
            out = out + (bf16_pair(low, high_half(words[j]) * as_float(gains[2 * j + 1])),)
        else:
            out = out + (times(words[j], gains[j]),)
    return out


@gluon.jit
def chunks_of(
    x_ptr, gains, at, lane, none, K: gl.constexpr, STRIDE: gl.constexpr, NORM: gl.constexpr,
    FP32: gl.constexpr,
):  # fmt: skip
    """This thread's chunks of 8 elements of x, times the gain, and squares of x, over all lanes.

    Squares are products too: of a chunk with itself, the diagonal of one `mma`.
    """
    g = lane // 4
    t = lane % 4
    zero = none.to(gl.int32)
    squares = (none, none, none, none)
    loaded = ()
    for first in gl.static_range(0, K // 8, STRIDE):
        chunk = gl.minimum(first + at, K // 8 - 1)  # past the end: the last one again
        loaded = loaded + (load16(x_ptr.to(gl.int64, bitcast=True) + chunk.to(gl.int64) * 16),)
    chunks = ()
    for first in gl.static_range(0, K // 8, STRIDE):
        w = loaded[first // STRIDE]
        if NORM:
            if first + STRIDE > K // 8:
                inside = first + at < K // 8
                w = words_where(inside, w)
            squares = mma(squares, w[0], zero, w[1], zero, w[0], w[1])
            squares = mma(squares, w[2], zero, w[3], zero, w[2], w[3])
            w = _times(w, gains[first // STRIDE], FP32)
        chunks = chunks + (w,)
    own = gl.where(g == 2 * t, squares[0], 0.0)
    return chunks, gl.where(g == 2 * t + 1, squares[1], own)


@gluon.jit
def total_of(at, none, WARPS: gl.constexpr):
    """The sum of what every thread has put in shared memory, in every lane."""
    total = none
    for w in gl.static_range(WARPS):
        total += load_shared4(at + w * 128)
    for i in gl.static_range(5):
        total += across(total, 1 << i)
    return total


@gluon.jit
def sum_of_parts(
    at, none, PARTS: gl.constexpr, HELD: gl.constexpr, COLUMNS: gl.constexpr
):  # fmt: skip
    """The sums of all warps that share a tile, in order: 2 * COLUMNS of this lane."""
    if COLUMNS == 1:
        y = (none, none)
        for p in gl.static_range(PARTS):
            v = load_shared8(at + p * (HELD * 8))
            y = (y[0] + as_float(v[0]), y[1] + as_float(v[1]))
    else:
        y = (none, none, none, none)
        for p in gl.static_range(PARTS):
            v = load_shared16(at + p * (HELD * 16))
            y = (
                y[0] + as_float(v[0]),
                y[1] + as_float(v[1]),
                y[2] + as_float(v[2]),  # type: ignore[misc]
                y[3] + as_float(v[3]),  # type: ignore[misc]
            )
    return y
