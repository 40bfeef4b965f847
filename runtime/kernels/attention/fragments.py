"""Device functions of attention over one block of keys: scores, online softmax, weighted values.

Lanes are those of `mma`: lane 4 * g + t. Query heads are rows of A and keys columns of B, both read
as chunks of 8 elements in natural order; scores then lie in the lanes as the B fragment that the
values multiply: lane's head g, keys 2 * t and 2 * t + 1 of each block of 8.

Keys and values lie in pages of PAGE rows; a row holds the heads of one token. The blocks that a
warp takes at a time lie in one page, so that one entry of the block table finds them all. Every sum
is an explicit `fma` or a plain add: kernels compile without fusion, so that each variant of a
kernel rounds alike.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.memory import load4, load_shared16, stream16, stream16_if
from lowbit.runtime.kernels.ptx.mma import across, bf16_pair, bytes_of, from_lane, mma, words_where
from lowbit.runtime.state.pages import PAGE

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
def _row_address(base, page, row, end, STRIDE: gl.constexpr):
    """Address of a row in its page; of the last row before `end` where the row is not before it."""
    inside = gl.maximum(gl.minimum(row, end - 1), 0) & (PAGE_ROWS - 1)
    return base + (page * PAGE_ROWS + inside).to(gl.int64) * STRIDE


@gluon.jit
def load_keys(base, page, row, end, t, wanted, PLAN: gl.constexpr):
    """B fragments of 8 keys a block: key g of this lane, chunks 4 * j + t of its elements.

    base: address of this head in row 0 of page 0; row: of key g in the first block; wanted: the
    warps that load, others get zeros. None: all load.
    """
    BLOCKS: gl.constexpr = PLAN.keys.blocks
    CHUNKS: gl.constexpr = PLAN.chunks
    keys = ()
    for b in gl.static_range(BLOCKS):
        at = _row_address(base, page, row + b * 8, end, PLAN.row)
        for j in gl.static_range(CHUNKS):
            chunk = at + gl.minimum(4 * j + t, PLAN.heads.dim // 8 - 1) * 16
            keys = keys + (stream16(chunk) if wanted is None else stream16_if(chunk, wanted),)
    return keys


@gluon.jit
def load_values(base, page, row, end, g, wanted, PLAN: gl.constexpr):
    """Chunks 8 * j + g of two values a block, of the keys whose scores this lane holds.

    base: address of the first column that is loaded; row: of key 2 * t in the first block; the rest
    as in `load_keys`.
    """
    BLOCKS: gl.constexpr = PLAN.keys.blocks
    SETS: gl.constexpr = PLAN.sets
    values = ()
    for b in gl.static_range(BLOCKS):
        for i in gl.static_range(2):
            at = _row_address(base, page, row + b * 8 + i, end, PLAN.row)
            for j in gl.static_range(SETS):
                chunk = at + gl.minimum(8 * j + g, PLAN.columns // 8 - 1) * 16
                values = values + (
                    stream16(chunk) if wanted is None else stream16_if(chunk, wanted),
                )
    return values


@gluon.jit
def with_fresh_keys(keys, staged, row, end, first, position, t, PLAN: gl.constexpr):
    """Replace keys of rows from `first` on, which this step appends, by those in shared memory.

    staged: address of this lane's chunk of the key at `position`; behind it lies the key one row
    earlier.
    """
    BLOCKS: gl.constexpr = PLAN.keys.blocks
    CHUNKS: gl.constexpr = PLAN.chunks
    new = ()
    for b in gl.static_range(BLOCKS):
        r = gl.maximum(gl.minimum(row + b * 8, end - 1), 0)
        fresh = r >= first
        at = staged + gl.where(fresh, position - r, 0) * PLAN.staged
        for j in gl.static_range(CHUNKS):
            words = load_queries(at, j, t, PLAN)
            old = keys[b * CHUNKS + j]
            one = ()
            for i in gl.static_range(4):
                one = one + (gl.where(fresh, words[i], old[i]),)
            new = new + (one,)
    return new


@gluon.jit
def with_fresh_values(values, value, row, end, first, position, g, PLAN: gl.constexpr):
    """Replace values of rows from `first` on, which this step appends, by those of its input.

    value: address of the value at `position`, first column.
    """
    BLOCKS: gl.constexpr = PLAN.keys.blocks
    SETS: gl.constexpr = PLAN.sets
    new = ()
    for b in gl.static_range(BLOCKS):
        for i in gl.static_range(2):
            r = gl.maximum(gl.minimum(row + b * 8 + i, end - 1), 0)
            fresh = r >= first
            at = value - gl.where(fresh, position - r, 0).to(gl.int64) * (2 * PLAN.width)
            for j in gl.static_range(SETS):
                chunk = at + gl.minimum(8 * j + g, PLAN.columns // 8 - 1) * 16
                words = stream16_if(chunk, fresh)
                old = values[(2 * b + i) * SETS + j]
                one = ()
                for w in gl.static_range(4):
                    one = one + (gl.where(fresh, words[w], old[w]),)
                new = new + (one,)
    return new


@gluon.jit
def load_queries(at, j: gl.constexpr, t, PLAN: gl.constexpr):
    """A fragment of the j-th chunk of every lane: four words of its row in shared memory."""
    words = load_shared16(at + j * 64)
    if PLAN.heads.dim < 32:  # past the head
        words = words_where(t < PLAN.heads.dim // 8, words)
    return words


@gluon.jit
def key_scores(q, keys, none, t, PLAN: gl.constexpr):
    """Products of head g of this lane with keys 2 * t, 2 * t + 1 of each block.

    q: words of the chunks; of wide heads, where they would be too many registers, the shared memory
    that `load_queries` reads.
    """
    CHUNKS: gl.constexpr = PLAN.chunks
    zero = none.to(gl.int32)
    scores = ()
    for b in gl.static_range(len(keys) // CHUNKS):
        s = (none, none, none, none)
        r = (none, none, none, none)  # a second chain, for latency
        for j in gl.static_range(CHUNKS):
            k = keys[b * CHUNKS + j]
            a = load_queries(q, j, t, PLAN) if PLAN.heads.dim > 128 else q[j]
            s = mma(s, a[0], zero, a[1], zero, k[0], k[1])
            r = mma(r, a[2], zero, a[3], zero, k[2], k[3])
        scores = scores + (s[0] + r[0], s[1] + r[1])
    return scores


@gluon.jit
def visible(scores, row, end, t, scale):
    """Scaled scores, without keys from `end` on."""
    out = ()
    for i in gl.static_range(len(scores)):
        inside = row + i // 2 * 8 + 2 * t + i % 2 < end
        out = out + (gl.where(inside, scores[i] * scale, float("-inf")),)
    return out


@gluon.jit
def online_softmax(top, total, scores):
    """Online softmax over new scores, in powers of two: top, total of this lane, fade, p.

    top is finite: the score of the new token to begin with. Scores that are all hidden change
    nothing, not even in the last bit.
    """
    new_top = top
    for i in gl.static_range(len(scores)):
        new_top = gl.maximum(new_top, scores[i])
    new_top = gl.maximum(new_top, across(new_top, 1))
    new_top = gl.maximum(new_top, across(new_top, 2))
    fade = gl.exp2(top - new_top)
    total = total * fade
    p = ()
    for i in gl.static_range(len(scores)):
        one = gl.exp2(scores[i] - new_top)
        total += one
        p = p + (one,)
    return new_top, total, fade, p


@gluon.jit
def add_values(acc, fade, p, values, none, t, PLAN: gl.constexpr):
    """Acc * fade + v^T @ p: columns 2 * u and 2 * u + 1 of chunks 8 * j + g, heads 2 * t and + 1.

    p, as the scores lie in the lanes, is a B fragment; fade is that of head g. None: acc is zero.
    """
    b = weight_words(p, none, PLAN)
    if fade is not None:
        even = from_lane(fade, t * 8)
        odd = from_lane(fade, t * 8 + 4)
    new = ()
    for quad in gl.static_range(4 * PLAN.sets):
        c = acc[quad]
        if fade is not None:
            c = (c[0] * even, c[1] * odd, c[2] * even, c[3] * odd)
        new = new + (add_column(c, values, quad, b, none, PLAN),)
    return new


@gluon.jit
def weight_words(p, none, PLAN: gl.constexpr):
    """The weights of a turn's keys as the B fragment that values are multiplied by."""
    return bf16_pair(p[0], p[1]), (
        bf16_pair(p[2], p[3]) if PLAN.keys.blocks == 2 else none.to(gl.int32)
    )


@gluon.jit
def add_column(c, values, quad: gl.constexpr, b, none, PLAN: gl.constexpr):
    """C + v^T @ p of the columns of a quad; b: see `weight_words`."""
    SETS: gl.constexpr = PLAN.sets
    first = values[quad // 4][quad % 4]
    second = values[SETS + quad // 4][quad % 4]
    a0 = bytes_of(first, second, 0x5410)
    a1 = bytes_of(first, second, 0x7632)
    a2 = none.to(gl.int32)
    a3 = a2
    if PLAN.keys.blocks == 2:
        third = values[2 * SETS + quad // 4][quad % 4]
        fourth = values[3 * SETS + quad // 4][quad % 4]
        a2 = bytes_of(third, fourth, 0x5410)
        a3 = bytes_of(third, fourth, 0x7632)
    return mma(c, a0, a1, a2, a3, b[0], b[1])
