"""Device functions that round eight elements of x to codes, as `formats.activations` says."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.formats.activations import SQUARES_UNIT
from lowbit.runtime.kernels.ptx.mma import (
    across,
    as_float,
    as_word,
    dot4,
    high_half,
    larger,
    largest,
    low_half,
    quotient,
    rounded_bytes,
    total,
)

LEAST_PEAK = gl.constexpr(0x0D800000)  # bits of 2^-100
INFINITE = gl.constexpr(0x7F800000)  # bits of infinity; those of NaN are more
INVERSE = gl.constexpr(1 / 127)
EXPONENT = gl.constexpr(0x7F800000)  # bits of an FP32
ONE_POWER = gl.constexpr(0x00800000)
LARGEST_POWER = gl.constexpr(0x5E800000)  # bits of 2^62
UNIT_BITS = gl.constexpr(SQUARES_UNIT.bit_length() - 1)
HALF_BIAS = gl.constexpr(125 - UNIT_BITS.value)
NOT_A_NUMBER = gl.constexpr(0x7FC00000)  # bits of the scale of a group that is not finite


@gluon.jit
def codes_of(w, factor, lane, SCALED: gl.constexpr, SUBBYTE: gl.constexpr, GROUP: gl.constexpr):
    """A lane's chunk of 8 elements as two words of codes, and of its group scale and squares.

    The scale is a word of an FP32; both make a bound, by `group_bound`.

    factor: what the chunk is multiplied by, where SCALED. SUBBYTE: of the `Codec`.
    """
    most = peak_of(w)
    if SCALED:
        most = as_word(as_float(most) * factor) & 0x7FFFFFFF
    most = _over_group(most, lane, GROUP)
    peak = as_float(gl.maximum(most, LEAST_PEAK))
    inverse = quotient(127.0, peak)
    first, second = rounded_chunk(w, factor, inverse, SCALED, SUBBYTE)
    scale = as_word(scale_of(most))
    squares = dot4(first, first) + dot4(second, second)
    squares = _sum_over_group((squares + ((1 << UNIT_BITS) - 1)) >> UNIT_BITS, lane, GROUP)
    return (first, second), scale, squares


@gluon.jit
def peak_of(w):
    """The largest |element| of a chunk, as the word of an FP32."""
    most = larger(
        larger(w[0] & 0x7FFF7FFF, w[1] & 0x7FFF7FFF),
        larger(w[2] & 0x7FFF7FFF, w[3] & 0x7FFF7FFF),
    )
    return gl.maximum(most >> 16, most & 0xFFFF) << 16


@gluon.jit
def scale_of(most):
    """The scale of a group, or of a token with one, by the word of its largest |element|."""
    scale = as_word(as_float(gl.maximum(most, LEAST_PEAK)) * INVERSE) | 1
    return as_float(gl.where(most >= INFINITE, NOT_A_NUMBER, scale))


@gluon.jit
def rounded_chunk(w, factor, inverse, SCALED: gl.constexpr, SUBBYTE: gl.constexpr):
    """A chunk of 8 elements as two words of codes, in the order of a weight's; see `codes_of`."""
    k0, k1 = _elements(w[0], factor, SCALED)
    k2, k3 = _elements(w[1], factor, SCALED)
    k4, k5 = _elements(w[2], factor, SCALED)
    k6, k7 = _elements(w[3], factor, SCALED)
    if SUBBYTE:
        first = rounded_bytes(k0, k4, k1, k5, inverse)
        second = rounded_bytes(k2, k6, k3, k7, inverse)
    else:
        first = rounded_bytes(k0, k2, k1, k3, inverse)
        second = rounded_bytes(k4, k6, k5, k7, inverse)
    return first, second


@gluon.jit
def group_bound(scale, squares):
    """The word of a power of two above a group, of what `codes_of` gives; see `token_bounds`."""
    half = ((as_word(squares.to(gl.float32)) >> 23) - HALF_BIAS) >> 1
    bound = gl.minimum(scale & EXPONENT, LARGEST_POWER) + ONE_POWER + (half << 23)
    bound = gl.minimum(bound, LARGEST_POWER)
    return gl.where((squares == 0) | (scale == NOT_A_NUMBER), 0, bound)


@gluon.jit
def _elements(pair, factor, SCALED: gl.constexpr):
    low = low_half(pair)
    high = high_half(pair)
    if SCALED:
        low *= factor
        high *= factor
    return low, high


@gluon.jit
def _over_group(word, lane, GROUP: gl.constexpr):
    """The largest word, none of which is negative, of the lanes with a chunk of the same group."""
    if GROUP == 128:
        low = lane < 16
        first = largest(gl.where(low, word, 0))
        second = largest(gl.where(low, 0, word))
        word = gl.where(low, first, second)
    else:
        for i in gl.static_range(3 if GROUP == 64 else 2):
            word = gl.maximum(word, as_word(across(as_float(word), 1 << i)))
    return word


@gluon.jit
def _sum_over_group(word, lane, GROUP: gl.constexpr):
    """The sum of the words of the lanes with a chunk of the same group; it has 16 bits."""
    if GROUP == 128:
        low = lane < 16
        both = total(gl.where(low, word, word << 16))
        word = gl.where(low, both, both >> 16) & 0xFFFF
    else:
        for i in gl.static_range(3 if GROUP == 64 else 2):
            word += as_word(across(as_float(word), 1 << i))
    return word
