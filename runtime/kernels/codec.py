"""Codecs: how codes of a width lie in the words that kernels load, one record each.

Codes of up to 4 bits share a byte: its upper bits are one of them times a power of two, once the
word is shifted and the rest is masked. So digits meet a multiple of the code, exactly, and results
are multiplied by FACTOR. A quarter of the codes of 3 bits span two words (`linear.tiles`).

Another width is another record, beside the instructions that take its codes out of their words:
`linear.unpack`, and for `wgmma` `ptx.wgmma`.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """Constants of a width; made once, so compared by identity."""

    BITS: int  # of a code
    SUBBYTE: bool  # a byte holds several codes: chunks are in the order k 0, 4, 1, 5, 2, 6, 3, 7
    SPANS: bool  # codes span words, so that every load has words of both rows of a lane
    TOP: int  # mask of the upper bits of each byte that hold a code once the word is shifted
    # of the native codes of a word (of 3 bits: of 24 bits); flipping them makes codes two's
    # complement
    SIGN_BITS: int
    # bit of a word at which each code lies, in order of k; none where they span words
    PLACES: tuple[int, ...]
    LOADS: int  # of 16 bytes by which a lane gets a step
    STEP_K: int  # columns of a step of a tile
    STEP_BYTES: int  # of a step's words, of all 16 rows
    PRODUCTS: int  # of a step, of 32 columns each
    BLOCKS: int  # of a step, of 64 columns, whose digits lie beside each other
    ROWS: int  # of wgmma's digits that a step takes: one has as many columns as the widest swizzle
    FACTOR: float  # makes a product of digits one of codes
    MEASURED_AS: int  # bits whose launches serve as many columns where none were measured


_NIBBLES = (0, 16, 4, 20, 8, 24, 12, 28)
_QUARTERS = (0, 16, 2, 18, 8, 24, 10, 26, 4, 20, 6, 22, 12, 28, 14, 30)
INT2 = Codec(
    2, True, False, -0x3F3F3F40, -0x55555556, _QUARTERS, 2, 256, 1024,
    PRODUCTS=8, BLOCKS=4, ROWS=2, FACTOR=2.0**-6, MEASURED_AS=4,
)  # fmt: skip
INT3 = Codec(
    3, True, True, -0x1F1F1F20, 0o44444444, (), 3, 256, 1536,
    PRODUCTS=8, BLOCKS=4, ROWS=2, FACTOR=2.0**-5, MEASURED_AS=4,
)  # fmt: skip
INT4 = Codec(
    4, True, False, -0x0F0F0F10, -0x77777778, _NIBBLES, 2, 128, 1024,
    PRODUCTS=4, BLOCKS=2, ROWS=1, FACTOR=2.0**-4, MEASURED_AS=4,
)  # fmt: skip
INT8 = Codec(
    8, False, False, -1, -0x7F7F7F80, (0, 16, 8, 24), 2, 64, 1024,
    PRODUCTS=2, BLOCKS=1, ROWS=1, FACTOR=1.0, MEASURED_AS=8,
)  # fmt: skip
CODECS = {codec.BITS: codec for codec in (INT2, INT3, INT4, INT8)}
# For x in eight bits, whose groups have up to 128 columns: two steps of 8 bits are one.
WIDE_INT8 = replace(INT8, LOADS=4, STEP_K=128, STEP_BYTES=2048, PRODUCTS=4, BLOCKS=2)
WIDE_CODECS = CODECS | {8: WIDE_INT8}
