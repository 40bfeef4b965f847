"""Device functions of a linear's norm: x times the gain, sums of squares, factors.

Blocks of 256 elements are what a warp takes at a time, a chunk of 8 a lane. A block's
results do not depend on the number of warps or tokens, so a token's sum of squares, which adds its
blocks in order, has the same bits in any company.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.launch.delta import MOST_SPLITS
from lowbit.runtime.kernels.linear.program import SQUARES_BYTES
from lowbit.runtime.kernels.ptx.memory import load16, load_shared4
from lowbit.runtime.kernels.ptx.mma import (
    across,
    as_float,
    bf16_pair,
    high_half,
    low_half,
    mma,
    times,
)

SQUARES = MOST_SPLITS  # parts of the sum of a head's squares, 16 bytes that one load takes


@gluon.jit
def place(turn: gl.constexpr, warp, WARPS: gl.constexpr, X: gl.constexpr):
    """Token and block that a warp takes in one of its turns."""
    BLOCKS: gl.constexpr = X.BLOCKS
    n = turn * WARPS + warp
    if X.TOKENS == 1:
        token = warp * 0
        block = n
    elif BLOCKS % WARPS == 0:
        token = warp * 0 + turn * WARPS // BLOCKS
        block = warp + turn * WARPS % BLOCKS
    else:
        token = n // BLOCKS
        block = n % BLOCKS
    return token, block


@gluon.jit
def load_gains(
    gain_ptr, warp, lane, TURNS: gl.constexpr, WARPS: gl.constexpr, X: gl.constexpr
):  # fmt: skip
    """Gains of the chunks that this thread stages in its first TURNS turns, as stored.

    Nothing waits for them here. The turns after `gain_turns` have the same ones again.
    """
    gains = ()
    if gain_ptr is not None:
        for turn in gl.static_range(TURNS):
            _, block = place(turn, warp, WARPS, X)
            chunk = gl.minimum(block * 32 + lane, X.K // 8 - 1).to(gl.int64)
            gains = gains + (chunk_gains(gain_ptr, chunk),)
    return gains


@gluon.jit
def chunk_gains(gain_ptr, chunk):
    """Gains of a chunk, as stored: four words of two in BF16, or eight in FP32."""
    if gain_ptr.dtype.element_ty == gl.float32:
        base = gain_ptr.to(gl.int64, bitcast=True) + chunk * 32
        gains = load16(base) + load16(base + 16)
    else:
        gains = load16(gain_ptr.to(gl.int64, bitcast=True) + chunk * 16)
    return gains


@gluon.jit
def head_factor(squares, eps, HEAD: gl.constexpr):
    """The norm's factor of a head of HEAD elements, from the parts of its sum of squares."""
    square = as_float(squares[0]) + as_float(squares[1])
    square = square + (as_float(squares[2]) + as_float(squares[3]))
    return gl.rsqrt(square / HEAD + eps)


@gluon.jit
def norm_factor(square, eps, K: gl.constexpr):
    """The factor of a norm over K elements, from the sum of their squares."""
    return gl.rsqrt(square / K + eps)


@gluon.jit
def times_gains(words, gains):
    """Eight elements times their gains, each product rounded once."""
    out = ()
    for j in gl.static_range(4):
        if len(gains) == 8:
            low = low_half(words[j]) * as_float(gains[2 * j])
            out = out + (bf16_pair(low, high_half(words[j]) * as_float(gains[2 * j + 1])),)
        else:
            out = out + (times(words[j], gains[j]),)
    return out


@gluon.jit
def add_squares(sums, w):
    """Sums with the products of a chunk of 8 elements with itself, on the diagonal of an `mma`."""
    zero = w[0] * 0
    sums = mma(sums, w[0], zero, w[1], zero, w[0], w[1])
    return mma(sums, w[2], zero, w[3], zero, w[2], w[3])


@gluon.jit
def diagonal(sums, lane):
    """Row g's sum in the lane 4 * g + g // 2, where the second value is true."""
    g = lane // 4
    return gl.where(g % 2 == 0, sums[0], sums[1]), g // 2 == lane % 4


@gluon.jit
def total_of(at, lane, zero_f32, X: gl.constexpr):
    """The sum of squares of a token, in every lane, from those of its blocks in shared memory."""
    total = zero_f32
    BLOCKS: gl.constexpr = X.BLOCKS
    for block in gl.static_range(BLOCKS):
        total += load_shared4(at + lane // 4 * 4, block * SQUARES_BYTES)
    for i in gl.static_range(2, 5):
        total += across(total, 1 << i)
    return total
