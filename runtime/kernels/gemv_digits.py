"""Device functions of the GEMV: x as digits of 8 bits, so that codes are multiplied as they are.

Codes are signed bytes, or the upper half of one, and tensor cores multiply bytes exactly. So x
becomes numbers of three digits to the base 256, and one `mma` takes the digits as its columns:

    x[k] = unit * (d0 + 256 * d1 + 65536 * d2)      d0, d1 in -128..127, d2 in -32..32

The unit is 2^-20 of the power of two below the largest of a block of 256 elements, which is what a
warp stages at a time: an element is off by at most 2^-21 of that largest, and one of BF16 above
2^-13 of it is exact. But it is at least 2^-126. NaN and infinities make their block NaN.

In shared memory: three planes of a byte for each k, 2 * d2 in the last, then the units in FP32.
Chunks of 8 lie as two steps of `integer_mma` take them, 16 bytes of a lane side by side; in each
the order of k is that of the codes in their words (`tiles`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.access import load_shared4, load_shared16, store_shared4, store_shared8
from lowbit.runtime.kernels.gemv_steps import zeros
from lowbit.runtime.kernels.mma import (
    as_float,
    as_word,
    bytes_of,
    high_half,
    integer_mma,
    larger,
    largest,
    low_half,
    unpacked_scales,
)

BLOCK_K = gl.constexpr(256)  # elements with one unit
TOP_WEIGHT = gl.constexpr(32768.0)  # of a digit in the last plane


def plane_bytes(K: int) -> int:
    """From one plane to the next: whole steps, and planes side by side in other banks."""
    return -(-K // 128) * 128 + 64


def digit_bytes(K: int) -> int:
    """Of shared memory for the planes and units of K elements: more than they take in BF16."""
    return 3 * plane_bytes(K) + -(-K // 1024) * 16


@gluon.jit
def stage_digits(
    chunks, factors, buffer, at, lane, K: gl.constexpr, STRIDE: gl.constexpr,
    BITS: gl.constexpr, PLANE: gl.constexpr,
):  # fmt: skip
    """Put this thread's chunks into shared memory; see `chunks_of`.

    factors: what each chunk is multiplied by, none for 1.
    """
    SCALED: gl.constexpr = len(factors) > 0
    for first in gl.static_range(0, K // 8, STRIDE):
        chunk = first + at
        inside = chunk < K // 8
        w = chunks[first // STRIDE]
        most = larger(
            larger(w[0] & 0x7FFF7FFF, w[1] & 0x7FFF7FFF),
            larger(w[2] & 0x7FFF7FFF, w[3] & 0x7FFF7FFF),
        )
        most = gl.maximum(most >> 16, most & 0xFFFF)
        if SCALED:
            most = as_word(as_float(most << 16) * factors[first // STRIDE]) >> 16
        # Its exponent; below 21 the unit would not be a normal number, and factors, which are at
        # most 2^10 (eps of 1e-6), must leave the scale finite.
        exponent = gl.maximum(largest(most) >> 7, 31 if SCALED else 21)
        scale = as_float((274 - exponent) << 23)
        if SCALED:
            scale *= factors[first // STRIDE]
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
        here = buffer + ((chunk // 8 * 4 + chunk % 4) * 16 + chunk // 4 % 2 * 8)
        for plane in gl.static_range(3):
            store_shared8(here + plane * PLANE, (a[plane], b[plane]), inside)
        unit = gl.where(exponent == 255, 0x7FC00000, (exponent - 20) << 23)
        store_shared4(buffer + 3 * PLANE + chunk // 32 * 4, as_float(unit), inside & (lane == 0))


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


@gluon.jit
def multiply_digits(
    acc, loaded, raw, digits, units, part, mixed, FIRST: gl.constexpr, C: gl.constexpr,
    G: gl.constexpr, BITS: gl.constexpr, K: gl.constexpr, R: gl.constexpr, PARTS: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    """Acc, sums of rows g and g + 8 for each tile, with what C loaded steps of every tile add.

    Steps are those of `load_steps`.

    Lanes t = 0 sum the lower two digits, lanes t = 1 the last; the rest
    repeat the last; see `TOP_WEIGHT`.

    digits: address of this lane's column in its plane, at the warp's first step; units: of the
    first unit; mixed: 256 in lanes t = 0, else 0.
    """
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    STEP_K: gl.constexpr = 512 // BITS
    Q: gl.constexpr = 16 // BITS  # products of a step
    GROUP_Q: gl.constexpr = min(Q, (G & -G) // 32)  # products that surely share a scale
    zero = mixed * 0
    sums = zeros(zero, C * R)
    factors = ()
    for c in gl.static_range(FIRST, FIRST + C):
        if (c + 1) * PARTS <= STEPS and PARTS * STEP_K % BLOCK_K == 0:
            here = units + part * STEP_K // BLOCK_K * 4
            factors = factors + (load_shared4(here, c * PARTS * STEP_K // BLOCK_K * 4),)
        else:
            step = part + c * PARTS
            unit = load_shared4(units + gl.minimum(step, STEPS - 1) * STEP_K // BLOCK_K * 4)
            factors = factors + (gl.where(step < STEPS, unit, 0.0),)
    pairs = ()  # columns of two products, of each step
    for q in gl.static_range(Q):
        if q % 2 == 0:
            pairs = ()
            for c in gl.static_range(FIRST, FIRST + C):
                if (c + 1) * PARTS <= STEPS:
                    pairs = pairs + (load_shared16(digits, c * PARTS * STEP_K + q * 32),)
                else:
                    at = gl.minimum(part + c * PARTS, STEPS - 1) - part
                    pairs = pairs + (load_shared16(digits + at * STEP_K, q * 32),)
        new = ()
        for c in gl.static_range(C):
            b0 = pairs[c][2 * (q % 2)]
            b1 = pairs[c][2 * (q % 2) + 1]
            for r in gl.static_range(R):
                low = loaded[2 * (r * C + c)]
                high = loaded[2 * (r * C + c) + 1]
                if BITS == 4:
                    new = new + (
                        integer_mma(
                            sums[c * R + r],
                            _upper(low[q] << 4), _upper(high[q] << 4), _upper(low[q]),
                            _upper(high[q]), b0, b1,
                        ),
                    )  # fmt: skip
                else:
                    new = new + (
                        integer_mma(
                            sums[c * R + r],
                            low[2 * q], high[2 * q], low[2 * q + 1], high[2 * q + 1], b0, b1,
                        ),
                    )  # fmt: skip
        sums = new
        if (q + 1) % GROUP_Q == 0:
            total = ()
            for r in gl.static_range(R):
                a = acc[r]
                for c in gl.static_range(C):
                    d = sums[c * R + r]
                    low_scale, high_scale = unpacked_scales(
                        raw[(r * C + c) * (Q // GROUP_Q) + q // GROUP_Q], SCALES
                    )
                    a = (
                        a[0] + low_scale * factors[c] * (d[0] + d[1] * mixed).to(gl.float32),
                        a[1] + high_scale * factors[c] * (d[2] + d[3] * mixed).to(gl.float32),
                    )
                total = total + (a,)
            acc = total
            if q + 1 < Q:
                sums = zeros(zero, C * R)
    return acc


@gluon.jit
def _upper(word):
    """Four codes of 4 bits times 16, as bytes: the upper half of each."""
    return word & -0x0F0F0F10
