"""Device functions of the GEMV: tiles times the digits of up to 16 tokens; see `gemv_digits`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.linear.stage import BLOCK_K
from lowbit.runtime.kernels.linear.steps import zeros
from lowbit.runtime.kernels.ptx.memory import (
    load4,
    load8,
    load_shared4,
    load_shared8,
    load_shared16,
    reload16,
)
from lowbit.runtime.kernels.ptx.mma import as_float, integer_mma, unpacked_scales

TOP_WEIGHT = gl.constexpr(32768.0)  # of a digit in the last plane
PAIRED_TOKENS = gl.constexpr(4)  # up to here a token has half of the columns


@gluon.jit
def column_of(lane, TOKENS: gl.constexpr, PLANE: gl.constexpr, TOKEN: gl.constexpr):
    """Offset of the first 16 bytes that this lane multiplies: of its column's token and plane."""
    g = lane // 4
    if TOKENS == 1:
        at = gl.minimum(g, 2) * PLANE
    elif TOKENS <= PAIRED_TOKENS:
        at = g // 4 * TOKEN + gl.minimum(g % 4, 2) * PLANE
    else:
        at = g * TOKEN
    return at + lane % 4 * 16


@gluon.jit
def unit_of(lane, TOKENS: gl.constexpr):
    """Offset of the unit of the first token whose sums this lane holds, and of the next."""
    if TOKENS == 1:
        at = lane * 0
    elif TOKENS <= PAIRED_TOKENS:
        at = lane % 4 // 2 * 4
    else:
        at = lane % 4 * 8
    return at


@gluon.jit
def sums_of_tokens(none, R: gl.constexpr, TOKENS: gl.constexpr):
    """Zero sums, with which `multiply_digits` begins."""
    acc = ()
    if TOKENS <= PAIRED_TOKENS:
        for _i in gl.static_range(R * ((TOKENS + 1) // 2)):
            acc = acc + ((none, none),)
    else:
        for _i in gl.static_range(R * (TOKENS // 8)):
            acc = acc + ((none, none, none, none, none, none, none, none),)
    return acc


@gluon.jit
def multiply_digits(
    acc, loaded, raw, digits, units, part, mixed, FIRST: gl.constexpr, C: gl.constexpr,
    G: gl.constexpr, BITS: gl.constexpr, K: gl.constexpr, R: gl.constexpr, PARTS: gl.constexpr,
    SCALES: gl.constexpr, TOKENS: gl.constexpr, STAGED: gl.constexpr, STRIDE: gl.constexpr,
    PLANE: gl.constexpr, TOKEN: gl.constexpr,
):  # fmt: skip
    """Acc with what C loaded steps of every tile add: sums of rows g and g + 8 for each token.

    Steps are those of `load_steps`. A token's scaled sums are added in the order of k, whatever C
    and the number of tokens.

    acc: up to 4 tokens, for every tile and two tokens a pair: rows g and g + 8, of the lower two
        digits in even lanes, of the last digit in odd ones. Else for every tile and 8 tokens eight
        sums: of the lower digits rows g of tokens 2 * t and 2 * t + 1, and rows g + 8 of both;
        then of the last digit.
    digits: address of this lane's column at the warp's first step, in shared memory where STAGED,
        else in global memory. STRIDE, PLANE, TOKEN: bytes to the next 64 k, plane, token.
    units: address of the lane's first unit.
    mixed: 256 in even lanes, 0 in odd ones.
    """
    Q: gl.constexpr = 16 // BITS  # products of a step
    GROUP_Q: gl.constexpr = min(Q, (G & -G) // 32)  # products that surely share a scale
    AT_ONCE: gl.constexpr = C if GROUP_Q == Q and TOKENS <= 2 else 1
    for first in gl.static_range(0, C, AT_ONCE):
        acc = _multiply(
            acc, loaded, raw, digits, units, part, mixed, FIRST, first, AT_ONCE, C, G, BITS, K, R,
            PARTS, SCALES, TOKENS, STAGED, STRIDE, PLANE, TOKEN,
        )  # fmt: skip
    return acc


@gluon.jit
def _multiply(
    acc, loaded, raw, digits, units, part, mixed, FIRST: gl.constexpr, BEGIN: gl.constexpr,
    COUNT: gl.constexpr, C: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr, K: gl.constexpr,
    R: gl.constexpr, PARTS: gl.constexpr, SCALES: gl.constexpr, TOKENS: gl.constexpr,
    STAGED: gl.constexpr, STRIDE: gl.constexpr, PLANE: gl.constexpr, TOKEN: gl.constexpr,
):  # fmt: skip
    """`multiply_digits` for COUNT of the C steps, from BEGIN on."""
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    Q: gl.constexpr = 16 // BITS
    GROUP_Q: gl.constexpr = min(Q, (G & -G) // 32)
    PAIRED: gl.constexpr = TOKENS <= PAIRED_TOKENS
    NT: gl.constexpr = (TOKENS + 1) // 2 if PAIRED else TOKENS // 8
    NB: gl.constexpr = NT if PAIRED else 3 * NT  # products of a step and tile, of 8 columns
    zero = mixed * 0
    factors = ()
    for c in gl.static_range(FIRST + BEGIN, FIRST + BEGIN + COUNT):
        factors = factors + (
            _units(units, part, c, K, BITS, PARTS, TOKENS, STAGED, PAIRED, NT, STEPS),
        )
    sums = zeros(zero, COUNT * R * NB)
    pairs = ()  # columns of two products, of each step
    for q in gl.static_range(Q):
        if q % 2 == 0:
            pairs = ()
            for c in gl.static_range(FIRST + BEGIN, FIRST + BEGIN + COUNT):
                for nb in gl.static_range(NB):
                    pairs = pairs + (
                        _columns(
                            digits, part, c,
                            q // 2 * STRIDE + (nb // 3 * 8 * TOKEN + nb % 3 * PLANE)
                            if not PAIRED else q // 2 * STRIDE + nb * 2 * TOKEN,
                            BITS, PARTS, STAGED, STRIDE, STEPS,
                        ),
                    )  # fmt: skip
        new = ()
        for c in gl.static_range(COUNT):
            for r in gl.static_range(R):
                low = loaded[2 * (r * C + BEGIN + c)]
                high = loaded[2 * (r * C + BEGIN + c) + 1]
                if BITS == 4:
                    a = (_upper(low[q] << 4), _upper(high[q] << 4), _upper(low[q]), _upper(high[q]))
                else:
                    a = (low[2 * q], high[2 * q], low[2 * q + 1], high[2 * q + 1])
                for nb in gl.static_range(NB):
                    b = pairs[c * NB + nb]
                    d = sums[(c * R + r) * NB + nb]
                    b0 = b[2 * (q % 2)]
                    b1 = b[2 * (q % 2) + 1]
                    new = new + (integer_mma(d, a[0], a[1], a[2], a[3], b0, b1),)
        sums = new
        if (q + 1) % GROUP_Q == 0:
            total = ()
            for r in gl.static_range(R):
                for nt in gl.static_range(NT):
                    a = acc[r * NT + nt]
                    for c in gl.static_range(COUNT):
                        scale = unpacked_scales(
                            raw[(r * C + BEGIN + c) * (Q // GROUP_Q) + q // GROUP_Q], SCALES
                        )
                        if PAIRED:
                            d = sums[(c * R + r) * NB + nt]
                            a = _add_pair(a, d, scale, factors[c][nt], mixed)
                        else:
                            d = (
                                sums[(c * R + r) * NB + 3 * nt],
                                sums[(c * R + r) * NB + 3 * nt + 1],
                                sums[(c * R + r) * NB + 3 * nt + 2],
                            )
                            a = _add_planes(a, d, scale, factors[c][nt])
                    total = total + (a,)
            acc = total
            if q + 1 < Q:
                sums = zeros(zero, COUNT * R * NB)
    return acc


@gluon.jit
def _units(
    units, part, c: gl.constexpr, K: gl.constexpr, BITS: gl.constexpr, PARTS: gl.constexpr,
    TOKENS: gl.constexpr, STAGED: gl.constexpr, PAIRED: gl.constexpr, NT: gl.constexpr,
    STEPS: gl.constexpr,
):  # fmt: skip
    """The units of a step for each of this lane's tokens; 0 past the last step."""
    STEP_K: gl.constexpr = 512 // BITS
    BYTES: gl.constexpr = TOKENS * 4  # of a block
    OWN: gl.constexpr = 8 if PAIRED else 32  # to the next of NT
    WHOLE: gl.constexpr = (c + 1) * PARTS <= STEPS and PARTS * STEP_K % BLOCK_K == 0
    step = part + c * PARTS
    at: gl.constexpr = c * PARTS * STEP_K // BLOCK_K * BYTES if WHOLE else 0
    if WHOLE:
        here = units + part * STEP_K // BLOCK_K * BYTES
    else:
        here = units + gl.minimum(step, STEPS - 1) * STEP_K // BLOCK_K * BYTES
    found = ()
    for nt in gl.static_range(NT):
        if PAIRED:
            if STAGED:
                unit = load_shared4(here, at + nt * OWN)
            else:
                unit = as_float(load4(here, at + nt * OWN))
            found = found + (unit if WHOLE else gl.where(step < STEPS, unit, 0.0),)
        else:
            if STAGED:
                pair = load_shared8(here, at + nt * OWN)
            else:
                pair = load8(here, at + nt * OWN)
            first = as_float(pair[0])
            second = as_float(pair[1])
            if not WHOLE:
                first = gl.where(step < STEPS, first, 0.0)
                second = gl.where(step < STEPS, second, 0.0)
            found = found + ((first, second),)
    return found


@gluon.jit
def _columns(
    digits, part, c: gl.constexpr, OFFSET: gl.constexpr, BITS: gl.constexpr, PARTS: gl.constexpr,
    STAGED: gl.constexpr, STRIDE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """16 bytes of this lane's column in a step: what it multiplies in two products."""
    STEP_BYTES: gl.constexpr = 8 // BITS * STRIDE
    if (c + 1) * PARTS <= STEPS:
        if STAGED:
            words = load_shared16(digits, c * PARTS * STEP_BYTES + OFFSET)
        else:
            words = reload16(digits, c * PARTS * STEP_BYTES + OFFSET)
    else:
        here = digits + (gl.minimum(part + c * PARTS, STEPS - 1) - part) * STEP_BYTES
        if STAGED:
            words = load_shared16(here, OFFSET)
        else:
            words = reload16(here, OFFSET)
    return words


@gluon.jit
def _add_pair(a, d, scale, unit, mixed):
    """Sums of two tokens with one product each."""
    return (
        a[0] + scale[0] * unit * (d[0] + d[1] * mixed).to(gl.float32),
        a[1] + scale[1] * unit * (d[2] + d[3] * mixed).to(gl.float32),
    )


@gluon.jit
def _add_planes(a, d, scale, unit):
    """Sums of eight tokens with one product each."""
    out = ()
    for i in gl.static_range(4):
        factor = scale[i // 2] * unit[i % 2]
        out = out + (a[i] + factor * (d[0][i] + d[1][i] * 256).to(gl.float32),)
    for i in gl.static_range(4):
        factor = scale[i // 2] * unit[i % 2]
        out = out + (a[4 + i] + factor * d[2][i].to(gl.float32),)
    return out


@gluon.jit
def _upper(word):
    """Four codes of 4 bits times 16, as bytes: the upper half of each."""
    return word & -0x0F0F0F10
