"""Device functions that take codes out of a lane's words (`tiles`): as bytes, or as pairs of BF16.

A lane's words of a step are a tuple of loads: of row g and of row g + 8, of 8 bits perhaps of two
steps; or of 3 bits three of both rows, as in `tiles`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.mma import pairs, times_plus

UPPER = gl.constexpr(-0x3F3F3F40)  # where the upper two of three bits belong in each byte
LOWEST = gl.constexpr(0x20202020)  # and the lowest one
ONES = gl.constexpr(0x3F803F80)  # two of 1.0


@gluon.jit
def product_codes(loads, q: gl.constexpr, CODEC: gl.constexpr):
    """The four registers of A of a step's q-th product: codes times 1 / FACTOR, as signed bytes."""
    return (
        _code_bytes(loads, q, 0, 0, CODEC),
        _code_bytes(loads, q, 0, 1, CODEC),
        _code_bytes(loads, q, 1, 0, CODEC),
        _code_bytes(loads, q, 1, 1, CODEC),
    )


@gluon.jit
def _code_bytes(
    loads, q: gl.constexpr, part: gl.constexpr, half: gl.constexpr, CODEC: gl.constexpr
):  # fmt: skip
    """Four codes of a row, of the first or second columns of a product."""
    if not CODEC.SUBBYTE:
        word = loads[q // 2 * 2 + half][2 * (q % 2) + part]
    elif CODEC.SPANS:
        n: gl.constexpr = 2 * q % 8 + part
        at: gl.constexpr = q // 4 * 2 + half
        if n < 6:
            word = _shifted(loads[n % 3][at], n // 3 * 3) & CODEC.TOP
        else:
            word = _shifted(loads[n - 6][at], 6) & UPPER | _shifted(loads[2][at], 11 - n) & LOWEST
    else:
        EACH: gl.constexpr = 4 // CODEC.BITS  # products of a word
        SLOT: gl.constexpr = 2 * (q % EACH) + part  # of these codes in their bytes
        word = _shifted(loads[half][q // EACH], 8 - CODEC.BITS * (SLOT + 1)) & CODEC.TOP
    return word


@gluon.jit
def chunk_pairs(loads, q: gl.constexpr, half: gl.constexpr, CODEC: gl.constexpr):
    """A row's q-th chunk of codes of up to 4 bits as four pairs of BF16, in the order of k.

    A code in the lowest bits of the mantissa of 128.0, with its sign bit turned, is 128 and half of
    its range more than itself.
    """
    if CODEC.BITS == 4:
        found = pairs(loads[half][q], True)
    else:
        found = ()
        for i in gl.static_range(4):
            if CODEC.SPANS:
                pair = _pair_of_three(loads, q // 4 * 2 + half, i // 2, 2 * q % 8 + i % 2)
            else:
                pair = _pair_of_two(loads[half][q // 2], i // 2, 2 * (q % 2) + i % 2)
            found = found + (pair,)
    return found


@gluon.jit
def _pair_of_two(word, byte: gl.constexpr, slot: gl.constexpr):
    """Codes of 2 bits in a slot of two bytes, 16 bits apart."""
    word = _shifted(word, -8 * byte - 2 * slot) & 0x00030003 ^ 0x43024302
    return times_plus(word, ONES, -0x3CFD3CFE)  # two of -130.0


@gluon.jit
def _pair_of_three(loads, at: gl.constexpr, byte: gl.constexpr, n: gl.constexpr):
    """The n-th codes of 3 bits of two bytes, 16 bits apart."""
    if n < 6:
        word = _shifted(loads[n % 3][at], n // 3 * 3 - 5 - 8 * byte) & 0x00070007
    else:
        word = _shifted(loads[n - 6][at], 1 - 8 * byte) & 0x00060006
        word = word | _shifted(loads[2][at], 6 - n - 8 * byte) & 0x00010001
    return times_plus(word ^ 0x43044304, ONES, -0x3CFB3CFC)  # two of -132.0


@gluon.jit
def _shifted(word, UP: gl.constexpr):
    """The word shifted up, or down by as much less than nothing."""
    if UP > 0:
        word = word << UP
    elif UP < 0:
        word = word >> -UP
    return word
