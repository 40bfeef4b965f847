"""Widths of codes: what a step of a tile holds, and how its words become codes. One record each.

A width of up to 4 bits has several codes in a byte: a byte's upper bits are one of them times a
power of two, once the word is shifted and the rest is masked. So digits meet a multiple of the
code, exactly, and results are multiplied by FACTOR. A quarter of the codes of 3 bits are in two
words (`tiles`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Width:
    """Constants of a width; made once, so compared by identity.

    Attributes:
        BITS: of a code.
        TOP: where they are in each byte of a word, once shifted up.
        LOADS: of 16 bytes by which a lane gets a step.
        STEP_K: columns of a step of a tile.
        STEP_BYTES: of a step's words, of all 16 rows.
        PRODUCTS: of a step, of 32 columns each.
        BLOCKS: of a step, of 64 columns, whose digits lie beside each other.
        ROWS: of wgmma's digits that a step takes: one has as many columns as the widest swizzle.
        FACTOR: makes a product of digits one of codes.
    """

    BITS: int
    TOP: int
    LOADS: int
    STEP_K: int
    STEP_BYTES: int
    PRODUCTS: int
    BLOCKS: int
    ROWS: int
    FACTOR: float


INT2 = Width(2, -0x3F3F3F40, 2, 256, 1024, PRODUCTS=8, BLOCKS=4, ROWS=2, FACTOR=2.0**-6)
INT3 = Width(3, -0x1F1F1F20, 3, 256, 1536, PRODUCTS=8, BLOCKS=4, ROWS=2, FACTOR=2.0**-5)
INT4 = Width(4, -0x0F0F0F10, 2, 128, 1024, PRODUCTS=4, BLOCKS=2, ROWS=1, FACTOR=2.0**-4)
INT8 = Width(8, -1, 2, 64, 1024, PRODUCTS=2, BLOCKS=1, ROWS=1, FACTOR=1.0)
WIDTHS = {width.BITS: width for width in (INT2, INT3, INT4, INT8)}
