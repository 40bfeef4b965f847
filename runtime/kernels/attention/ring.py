"""Device functions: keys and values that come through a ring in shared memory, a warp's own.

An entry is a block of a split: those of its keys come first, then those of its values. All lanes
of the warp copy an entry, 16 bytes each at a time; RING - 1 entries are on their way while one is
used. Of codes words with scales stand behind the ring: those of a block's keys, then of its values.

A row of an entry holds its pieces of 16 bytes in another order, by the row's number among eight, so
that neither lanes with the same pieces of rows side by side (keys) nor those with neighbouring
pieces of every second row (values) share a bank.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.attention.codes import row_of_codes
from lowbit.runtime.kernels.attention.page_rows import PAGE_ROWS, page_of, row_number
from lowbit.runtime.kernels.ptx.memory import (
    commit_copies,
    copy4,
    copy16_or_zeros,
    load_shared4,
    load_shared16,
)
from lowbit.runtime.kernels.ptx.mma import as_word, bytes_of


@gluon.jit
def split_pages(table, split, end, PLAN: gl.constexpr):
    """The pages of a split's keys."""
    TURN: gl.constexpr = PLAN.keys.turn
    pages = ()
    for first in gl.static_range(0, TURN, PAGE_ROWS):
        pages = pages + (page_of(table, split * TURN + first, end),)
    return pages


@gluon.jit
def begin_following(
    bases, pages, split, end, i: gl.constexpr, FIRST: gl.constexpr, ring, lane, PLAN: gl.constexpr
):  # fmt: skip
    """Begin to copy what is used PLAN.ring - 1 entries after the i-th of a split, one batch.

    pages: of the split and of the warp's next one; FIRST: the split's first entry.
    """
    BLOCKS: gl.constexpr = PLAN.keys.warps
    AHEAD: gl.constexpr = PLAN.ring - 1
    if i + AHEAD < 2 * BLOCKS:
        begin_block(
            bases, pages[0], split, end, i + AHEAD, FIRST + i + AHEAD, ring, lane, PLAN
        )  # fmt: skip
    elif len(pages[1]) > 0:
        begin_block(
            bases, pages[1], split + PLAN.running, end, i + AHEAD - 2 * BLOCKS, FIRST + i + AHEAD,
            ring, lane, PLAN,
        )  # fmt: skip
    commit_copies()


@gluon.jit
def begin_block(
    bases, pages, split, end, i: gl.constexpr, ENTRY: gl.constexpr, ring, lane, PLAN: gl.constexpr
):  # fmt: skip
    """Begin to copy the i-th block of a split, keys first and then values, with all its scales.

    bases: see `bases_of`; ENTRY: of the ring; ring: its address.
    """
    BLOCKS: gl.constexpr = PLAN.keys.warps
    KEYS: gl.constexpr = 8 * PLAN.keys.blocks
    TURN: gl.constexpr = PLAN.keys.turn
    BLOCK: gl.constexpr = i % BLOCKS
    first = split * TURN + BLOCK * KEYS
    to = ring + ENTRY % PLAN.ring * PLAN.entry
    begin_rows(bases[i // BLOCKS], pages[BLOCK * KEYS // PAGE_ROWS], first, end, to, lane, PLAN)
    if PLAN.quantized and i == 0:
        for row in gl.static_range(0, TURN, KEYS):
            to = ring + PLAN.scales_in_ring + row * 8
            begin_scales(bases, pages[row // PAGE_ROWS], split * TURN + row, to, lane, PLAN)


@gluon.jit
def begin_rows(base, page, first, end, to, lane, PLAN: gl.constexpr):
    """Begin to copy a block of keys, or of values.

    base: of `bases_of`; page: of its rows; first: the first of them; end: the row before which the
    sequence ends, nothing is read where that is not behind the first; to: the entry's address.
    """
    KEYS: gl.constexpr = 8 * PLAN.keys.blocks
    BYTES: gl.constexpr = PLAN.heads.dim * PLAN.size  # of a row
    PIECES: gl.constexpr = BYTES // 16
    ROWS: gl.constexpr = 32 // PIECES  # that the warp copies at a time
    inside = first < end
    piece = lane % PIECES
    own = lane // PIECES
    source = base + piece.to(gl.int64) * 16
    if PLAN.quantized:
        source += row_of_codes(page, first + own) * PLAN.row
    for n in gl.static_range(KEYS // ROWS):
        row = n * ROWS + own
        target = to + own * BYTES + (piece ^ _turn_of(row)) * 16
        if PLAN.quantized:
            copy16_or_zeros(target, source, inside, n * ROWS * BYTES, n * ROWS * PLAN.row)
        else:
            at = source + row_number(page, first + row, end) * PLAN.row
            copy16_or_zeros(target, at, inside, n * ROWS * BYTES)


@gluon.jit
def begin_scales(bases, page, first, to, lane, PLAN: gl.constexpr):
    """Begin to copy words of two heads' scales: of 32 keys, then of their values."""
    number = row_of_codes(page, first + lane) * PLAN.stored
    for s in gl.static_range(2):
        at = (bases[2 + s] + number).to(gl.int64, bitcast=True) & -4
        copy4(to + lane * 4, at, 0, s * 128)


@gluon.jit
def _turn_of(row):
    """The number that the numbers of a row's pieces are changed by."""
    return (row & 6) ^ ((row & 1) << 2)


@gluon.jit
def take_keys(entry, scales_at, first, end, head, lane, PLAN: gl.constexpr):
    """Keys as `load_keys` loads them, of an entry; of codes the scales of rows before `end`.

    entry, scales_at: addresses; first: row of the entry; head: of keys, in pages.
    """
    BLOCKS: gl.constexpr = PLAN.keys.blocks
    CHUNKS: gl.constexpr = PLAN.chunks
    BYTES: gl.constexpr = PLAN.heads.dim * PLAN.size
    g = lane // 4
    t = lane % 4
    keys = ()
    for b in gl.static_range(BLOCKS):
        for j in gl.static_range(CHUNKS):
            piece = (4 * j + t) ^ _turn_of(g)
            keys = keys + (load_shared16(entry + g * BYTES + piece * 16, b * 8 * BYTES),)
    if PLAN.quantized:
        k = as_word(load_shared4(scales_at + lane * 4))
        v = as_word(load_shared4(scales_at + lane * 4, 128))
        odd = (head & 1) == 1
        both = gl.where(odd, bytes_of(k, v, 0x7632), bytes_of(k, v, 0x5410))
        keys = keys + (gl.where(first + lane < end, both, 0),)
    return keys


@gluon.jit
def take_values(entry, g, t, PLAN: gl.constexpr):
    """Values as `load_values` loads them, of an entry; its address is given."""
    BLOCKS: gl.constexpr = PLAN.keys.blocks
    LOADS: gl.constexpr = PLAN.loads
    BYTES: gl.constexpr = PLAN.heads.dim * PLAN.size
    values = ()
    for b in gl.static_range(BLOCKS):
        for i in gl.static_range(2):
            row = 2 * t + i
            for j in gl.static_range(LOADS):
                piece = (8 * j + g) ^ _turn_of(row)
                values = values + (load_shared16(entry + row * BYTES + piece * 16, b * 8 * BYTES),)
    return values
