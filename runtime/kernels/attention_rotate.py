"""Device functions: heads of one token normed and rotated, as fragments of `mma` (see `rotate`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.mma import (
    across,
    as_float,
    bf16_pair,
    high_half,
    load16,
    low_half,
)


@gluon.jit
def _words(base, at, FP32: gl.constexpr):
    """Eight consecutive numbers from element `at` on, as they are stored."""
    if FP32:
        out = load16(base + at.to(gl.int64) * 4) + load16(base + at.to(gl.int64) * 4 + 16)
    else:
        out = load16(base + at.to(gl.int64) * 2)
    return out


@gluon.jit
def _floats(w, FP32: gl.constexpr):
    """Eight numbers of `_words` in FP32."""
    if FP32:
        out = (
            as_float(w[0]), as_float(w[1]), as_float(w[2]), as_float(w[3]),
            as_float(w[4]), as_float(w[5]), as_float(w[6]), as_float(w[7]),
        )  # fmt: skip
    else:
        out = (
            low_half(w[0]), high_half(w[0]), low_half(w[1]), high_half(w[1]),
            low_half(w[2]), high_half(w[2]), low_half(w[3]), high_half(w[3]),
        )  # fmt: skip
    return out


@gluon.jit
def load_rotation(
    gain, cos, sin, position, t, NORM: gl.constexpr, FP32: gl.constexpr, D: gl.constexpr,
    R: gl.constexpr,
):  # fmt: skip
    """What rotation needs beside the head: gains and angles of this lane's chunks, as stored."""
    gains = ()
    angles = ()
    if NORM:
        for j in gl.static_range((D + 31) // 32):
            gains = gains + (_words(gain, gl.minimum(4 * j + t, D // 8 - 1) * 8, FP32),)
    if R % 64 == 0:
        for j in gl.static_range(R // 64):
            at = position * (R // 2) + (4 * j + t) * 8
            angles = angles + ((_words(cos, at, True), _words(sin, at, True)),)
    return gains, angles


@gluon.jit
def rotated_fragments(
    x, gain, cos, sin, rotation, position, t, none, eps, NORM: gl.constexpr, FP32: gl.constexpr,
    D: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """A head of each lane's row g, normed and rotated: words of its chunks 4 * j + t in BF16.

    x, gain, cos, sin: addresses; of a head, of its gain, of the tables. rotation: `load_rotation`'s.
    """
    CHUNKS: gl.constexpr = (D + 31) // 32
    HALF: gl.constexpr = R // 64  # chunks of this lane before their partners, which are its too
    loaded = ()
    for j in gl.static_range(CHUNKS):
        loaded = loaded + (_words(x, gl.minimum(4 * j + t, D // 8 - 1) * 8, False),)
    square = none
    own = ()
    for j in gl.static_range(CHUNKS):
        elements = ()
        head = _floats(loaded[j], False)
        if NORM:
            gains = _floats(rotation[0][j], FP32)
        for i in gl.static_range(8):
            one = head[i]
            square += one * one if D >= 32 else gl.where(t < D // 8, one * one, 0.0)
            elements = elements + (one * gains[i] if NORM else one,)
        own = own + (elements,)
    factor = none + 1.0
    if NORM:
        square += across(square, 1)
        square += across(square, 2)
        factor = gl.rsqrt(square / D + eps)
    turned = ()
    if R % 64 == 0:
        rest = ()
        for j in gl.static_range(HALF):
            c = _floats(rotation[1][j][0], True)
            s = _floats(rotation[1][j][1], True)
            low = ()
            high = ()
            for i in gl.static_range(8):
                low = low + (own[j][i] * c[i] - own[j + HALF][i] * s[i],)
                high = high + (own[j + HALF][i] * c[i] + own[j][i] * s[i],)
            turned = turned + (low,)
            rest = rest + (high,)
        turned = turned + rest
        for j in gl.static_range(2 * HALF, CHUNKS):
            turned = turned + (own[j],)
    else:
        for j in gl.static_range(CHUNKS):
            turned = turned + (_turned(own, x, gain, cos, sin, position, t, j, NORM, FP32, D, R),)
    out = ()
    for j in gl.static_range(CHUNKS):
        words = ()
        for i in gl.static_range(4):
            word = bf16_pair(turned[j][2 * i] * factor, turned[j][2 * i + 1] * factor)
            words = words + (word if D >= 32 else gl.where(t < D // 8, word, 0),)
        out = out + (words,)
    return out


@gluon.jit
def _turned(
    own, x, gain, cos, sin, position, t, j: gl.constexpr, NORM: gl.constexpr,
    FP32: gl.constexpr, D: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """A chunk rotated, its partner loaded: other lanes have it."""
    chunk = gl.minimum(4 * j + t, R // 8 - 1)
    partner = (chunk + R // 16) % (R // 8)
    others = _floats(_words(x, partner * 8, False), False)
    angle = position * (R // 2) + chunk % (R // 16) * 8
    c = _floats(_words(cos, angle, True), True)
    s = _floats(_words(sin, angle, True), True)
    if NORM:
        gains = _floats(_words(gain, partner * 8, FP32), FP32)
    elements = ()
    for i in gl.static_range(8):
        other = others[i] * gains[i] if NORM else others[i]
        value = own[j][i] * c[i] + gl.where(chunk < R // 16, -other, other) * s[i]
        elements = elements + (gl.where(4 * j + t < R // 8, value, own[j][i]),)
    return elements
