"""Device functions of the GEMV: x on its way to shared memory, times the gain of a norm."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.mma import (
    across,
    as_float,
    bf16_pair,
    high_half,
    load16,
    load_shared4,
    load_shared8,
    load_shared16,
    low_half,
    store_shared4,
    store_shared16,
)


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
def _pair(words, j: gl.constexpr, FP32: gl.constexpr):
    """Gains 2 * j and 2 * j + 1 of a chunk."""
    if FP32:
        pair = (as_float(words[2 * j]), as_float(words[2 * j + 1]))
    else:
        pair = (low_half(words[j]), high_half(words[j]))
    return pair


@gluon.jit
def stage_x(
    x_ptr, gains, buffer, at, none, K: gl.constexpr, STRIDE: gl.constexpr, NORM: gl.constexpr,
    FP32: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Put x into shared memory, times the gain where there is one; its squares, per thread.

    SUMS: after x, K / 32 sums of 32 elements, FP32, of x as it is stored.
    """
    squares = none
    loaded = ()
    for first in gl.static_range(0, K // 8, STRIDE):
        chunk = gl.minimum(first + at, K // 8 - 1)  # past the end: the last one again
        loaded = loaded + (load16(x_ptr.to(gl.int64, bitcast=True) + chunk.to(gl.int64) * 16),)
    for first in gl.static_range(0, K // 8, STRIDE):
        inside = first + at < K // 8
        chunk = gl.minimum(first + at, K // 8 - 1)
        words = loaded[first // STRIDE]
        if NORM:
            scaled = ()
            for j in gl.static_range(4):
                low = low_half(words[j])
                high = high_half(words[j])
                gain = _pair(gains[first // STRIDE], j, FP32)
                square = low * low + high * high
                if first + STRIDE > K // 8:
                    square = gl.where(inside, square, 0.0)
                squares += square
                scaled = scaled + (bf16_pair(low * gain[0], high * gain[1]),)
            words = scaled
        store_shared16(buffer + chunk * 16, words, inside)
        if SUMS:
            total = none
            for j in gl.static_range(4):
                total += low_half(words[j]) + high_half(words[j])
            total += across(total, 1)  # four lanes have the chunks of 32 elements
            total += across(total, 2)
            store_shared4(buffer + 2 * K + chunk // 4 * 4, total, inside & (at % 4 == 0))
    return squares


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
                y[2] + as_float(v[2]),
                y[3] + as_float(v[3]),
            )
    return y
