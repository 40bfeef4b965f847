"""Device functions: heads of one token normed and rotated, as fragments of `mma` (see `rotate`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.mma import across, bf16_pair, high_half, load16, low_half


@gluon.jit
def _eight(base, at, FP32: gl.constexpr):
    """Eight consecutive numbers from element `at` on, in FP32."""
    if FP32:
        a = load16(base + at.to(gl.int64) * 4)
        b = load16(base + at.to(gl.int64) * 4 + 16)
        out = (
            a[0].to(gl.float32, bitcast=True), a[1].to(gl.float32, bitcast=True),
            a[2].to(gl.float32, bitcast=True), a[3].to(gl.float32, bitcast=True),
            b[0].to(gl.float32, bitcast=True), b[1].to(gl.float32, bitcast=True),
            b[2].to(gl.float32, bitcast=True), b[3].to(gl.float32, bitcast=True),
        )  # fmt: skip
    else:
        w = load16(base + at.to(gl.int64) * 2)
        out = (
            low_half(w[0]), high_half(w[0]), low_half(w[1]), high_half(w[1]),
            low_half(w[2]), high_half(w[2]), low_half(w[3]), high_half(w[3]),
        )  # fmt: skip
    return out


@gluon.jit
def rotated_fragments(
    x, gain, cos, sin, position, t, none, eps, NORM: gl.constexpr, FP32: gl.constexpr,
    D: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """A head of each lane's row g, normed and rotated: words of its chunks 4 * j + t in BF16.

    x, gain, cos, sin: addresses; of a head, of its gain, of the tables.
    """
    CHUNKS: gl.constexpr = (D + 31) // 32
    HALF: gl.constexpr = R // 64  # chunks of this lane before their partners, which are its too
    loaded = ()
    gains = ()
    coss = ()
    sins = ()
    for j in gl.static_range(CHUNKS):
        chunk = gl.minimum(4 * j + t, D // 8 - 1)
        loaded = loaded + (_eight(x, chunk * 8, False),)
        if NORM:
            gains = gains + (_eight(gain, chunk * 8, FP32),)
    if R % 64 == 0:
        for j in gl.static_range(HALF):
            coss = coss + (_eight(cos, position * (R // 2) + (4 * j + t) * 8, True),)
            sins = sins + (_eight(sin, position * (R // 2) + (4 * j + t) * 8, True),)
    square = none
    own = ()
    for j in gl.static_range(CHUNKS):
        elements = ()
        for i in gl.static_range(8):
            one = loaded[j][i]
            square += one * one if D >= 32 else gl.where(t < D // 8, one * one, 0.0)
            elements = elements + (one * gains[j][i] if NORM else one,)
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
            c = coss[j]
            s = sins[j]
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
    others = _eight(x, partner * 8, False)
    angle = position * (R // 2) + chunk % (R // 16) * 8
    c = _eight(cos, angle, True)
    s = _eight(sin, angle, True)
    if NORM:
        gains = _eight(gain, partner * 8, FP32)
    elements = ()
    for i in gl.static_range(8):
        other = others[i] * gains[i] if NORM else others[i]
        value = own[j][i] * c[i] + gl.where(chunk < R // 16, -other, other) * s[i]
        elements = elements + (gl.where(4 * j + t < R // 8, value, own[j][i]),)
    return elements
