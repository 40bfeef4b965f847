"""Device functions: where the rows of a sequence's keys and values lie in its pages.

A page has PAGE rows; a row holds the heads of one token. The blocks that a warp takes at a time lie
in one page, so that one entry of the block table finds them all.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.formats.page_counts import PAGE
from lowbit.runtime.kernels.ptx.memory import load4

PAGE_ROWS = gl.constexpr(PAGE)
ROW_BITS = gl.constexpr(PAGE.bit_length() - 1)


@gluon.jit
def page_of(table, row, end):
    """Load the page that a block table names for a row, or for the last one before `end`."""
    entry = gl.maximum(gl.minimum(row, end - 1), 0) >> ROW_BITS
    return load4(table + entry.to(gl.int64) * 4)


@gluon.jit
def page_at(table, row, entries):
    """`page_of` a row that is before the end, or else any page; it waits for no position."""
    return load4(table + gl.minimum(row >> ROW_BITS, entries - 1).to(gl.int64) * 4)


@gluon.jit
def row_number(page, row, end):
    """Number of a row among those of all pages; of the last row before `end` where it is not."""
    inside = gl.maximum(gl.minimum(row, end - 1), 0) & (PAGE_ROWS - 1)
    return (page * PAGE_ROWS + inside).to(gl.int64)
