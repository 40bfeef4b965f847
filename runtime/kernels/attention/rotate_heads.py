"""Device functions: heads of a token normed and rotated, a warp a head (see `rotate`).

Sums are explicit `fma`s: a key has the same bits wherever it is rotated.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.memory import load4, load8
from lowbit.runtime.kernels.ptx.mma import across, as_float, bf16_pair, high_half, low_half


@gluon.jit
def _own(lane, i: gl.constexpr, D: gl.constexpr):
    """Number of the i-th word, a pair of elements, that a lane takes of a head."""
    return gl.minimum(lane + 32 * i, D // 2 - 1)


@gluon.jit
def _partner(word, R: gl.constexpr):
    """Number of the word that rotates with `word`; `word` itself where nothing rotates."""
    return gl.where(word < R // 2, (word + R // 4) % (R // 2), word)


@gluon.jit
def _gains(gain, word, FP32: gl.constexpr):
    if FP32:
        pair = load8(gain + word.to(gl.int64) * 8)
    else:
        one = load4(gain + word.to(gl.int64) * 4)
        pair = (one, one)
    return pair


@gluon.jit
def _scaled(word, gains, NORM: gl.constexpr, FP32: gl.constexpr):
    """Two elements in FP32 times their gains."""
    pair = (low_half(word), high_half(word))
    if NORM:
        if FP32:
            pair = (pair[0] * as_float(gains[0]), pair[1] * as_float(gains[1]))
        else:
            pair = (pair[0] * low_half(gains[0]), pair[1] * high_half(gains[0]))
    return pair


@gluon.jit
def load_angles(cos, sin, position, lane, PLAN: gl.constexpr):
    """Cosines and sines of this lane's words at a position, the same for every head."""
    D: gl.constexpr = PLAN.heads.dim
    R: gl.constexpr = PLAN.heads.rotated
    loaded = ()
    for i in gl.static_range((D + 63) // 64):
        at = (position * (R // 2) + 2 * _own(lane, i, D) % (R // 2)).to(gl.int64) * 4
        loaded = loaded + ((load8(cos + at), load8(sin + at)),)
    return loaded


@gluon.jit
def load_head_gains(gain, lane, PLAN: gl.constexpr):
    """Gains of this lane's words and of their partners, as stored; none without a norm."""
    D: gl.constexpr = PLAN.heads.dim
    R: gl.constexpr = PLAN.heads.rotated
    FP32: gl.constexpr = PLAN.wide_gains
    loaded = ()
    for i in gl.static_range((D + 63) // 64 if PLAN.normed else 0):
        word = _own(lane, i, D)
        loaded = loaded + ((_gains(gain, word, FP32), _gains(gain, _partner(word, R), FP32)),)
    return loaded


@gluon.jit
def rotated(x, gains, angles, lane, zero_f32, eps, PLAN: gl.constexpr, plain=None):
    """A head, normed and rotated: words lane, lane + 32... of it in BF16.

    For codes their elements in FP32 instead, two a word.

    x: its address; gains, angles: as loaded; plain: warps whose head stays as it is.
    """
    D: gl.constexpr = PLAN.heads.dim
    R: gl.constexpr = PLAN.heads.rotated
    NORM: gl.constexpr = PLAN.normed
    FP32: gl.constexpr = PLAN.wide_gains
    words = ()
    for i in gl.static_range((D + 63) // 64):
        word = _own(lane, i, D)
        words = words + (load4(x + word.to(gl.int64) * 4),)
        words = words + (load4(x + _partner(word, R).to(gl.int64) * 4),)
    square = zero_f32
    turned = ()
    for i in gl.static_range((D + 63) // 64):
        low = low_half(words[2 * i])
        high = high_half(words[2 * i])
        mine = gl.fma(high, high, low * low)
        square += mine if D >= 64 else gl.where(lane < D // 2, mine, 0.0)
        own = _scaled(words[2 * i], gains[i][0] if NORM else (), NORM, FP32)
        other = _scaled(words[2 * i + 1], gains[i][1] if NORM else (), NORM, FP32)
        word = _own(lane, i, D)
        sign = gl.where(word < R // 4, -1.0, 1.0)
        pair = ()
        for j in gl.static_range(2):
            c = as_float(angles[i][0][j])
            s = as_float(angles[i][1][j]) * sign
            if R < D:
                c = gl.where(word < R // 2, c, 1.0)
                s = gl.where(word < R // 2, s, 0.0)
            pair = pair + (gl.fma(own[j], c, other[j] * s),)
        turned = turned + (pair,)
    factor = zero_f32 + 1.0
    if NORM:
        for i in gl.static_range(5):
            square += across(square, 1 << i)
        factor = gl.rsqrt(square / D + eps)
    out = ()
    for i in gl.static_range((D + 63) // 64):
        if PLAN.quantized:
            out = out + (gl.where(plain, low_half(words[2 * i]), turned[i][0] * factor),)
            out = out + (gl.where(plain, high_half(words[2 * i]), turned[i][1] * factor),)
        else:
            out = out + (bf16_pair(turned[i][0] * factor, turned[i][1] * factor),)
    return out
