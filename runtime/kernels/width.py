"""Widths of codes: what a step of a tile holds, and how its words become codes. One record each.

A width of up to 4 bits has several codes in a byte: a byte's upper bits are one of them times a
power of two, once the word is shifted and the rest is masked. So digits meet `SCALED` times the
code, exactly, and results are multiplied by `FACTOR`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Width:
    """Constants of a width; made once, so compared by identity.

    Attributes:
        BITS: of a code.
        STEP_K: columns of a step of a tile.
        STEP_BYTES: of a step's words, of all 16 rows.
        PRODUCTS: of a step, of 32 columns each.
        BLOCKS: of a step, of 64 columns, whose digits lie beside each other.
        FACTOR: makes a product of digits one of codes.
    """

    BITS: int
    STEP_K: int
    STEP_BYTES: int
    PRODUCTS: int
    BLOCKS: int
    FACTOR: float


INT4 = Width(4, STEP_K=128, STEP_BYTES=1024, PRODUCTS=4, BLOCKS=2, FACTOR=2.0**-4)
INT8 = Width(8, STEP_K=64, STEP_BYTES=1024, PRODUCTS=2, BLOCKS=1, FACTOR=1.0)
WIDTHS = {width.BITS: width for width in (INT4, INT8)}
