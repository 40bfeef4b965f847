"""Device functions of attention over one block of keys: scores, online softmax, weighted values.

Lanes are those of `mma`: lane 4 * g + t. Query heads are rows of A and keys columns of B, both read
as chunks of 8 elements in natural order; scores then lie in the lanes as the B fragment that the
values multiply: lane's head g, keys 2 * t and 2 * t + 1 of each block of 8.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.access import load_shared16, stream16, stream16_if
from lowbit.runtime.kernels.mma import across, bf16_pair, bytes_of, from_lane, mma


@gluon.jit
def load_keys(base, row, end, t, wanted, D: gl.constexpr, BLOCKS: gl.constexpr):
    """B fragments of 8 keys a block: key g of this lane, chunks 4 * j + t of its D elements.

    wanted: by which warps; others get zeros. None: by all.
    """
    keys = ()
    for b in gl.static_range(BLOCKS):
        at = base + gl.maximum(gl.minimum(row + b * 8, end - 1), 0).to(gl.int64) * (2 * D)
        for j in gl.static_range((D + 31) // 32):
            chunk = at + gl.minimum(4 * j + t, D // 8 - 1) * 16
            keys = keys + (stream16(chunk) if wanted is None else stream16_if(chunk, wanted),)
    return keys


@gluon.jit
def load_values(
    base, row, end, g, wanted, D: gl.constexpr, COLUMNS: gl.constexpr, BLOCKS: gl.constexpr
):  # fmt: skip
    """Chunks 8 * j + g of two values a block, of the keys whose scores this lane holds.

    base: of the first of the columns that are loaded; wanted: as in `load_keys`.
    """
    values = ()
    for b in gl.static_range(BLOCKS):
        for i in gl.static_range(2):
            at = base + gl.maximum(gl.minimum(row + b * 8 + i, end - 1), 0).to(gl.int64) * (2 * D)
            for j in gl.static_range((COLUMNS + 63) // 64):
                chunk = at + gl.minimum(8 * j + g, COLUMNS // 8 - 1) * 16
                values = values + (
                    stream16(chunk) if wanted is None else stream16_if(chunk, wanted),
                )
    return values


@gluon.jit
def load_queries(at, j: gl.constexpr, t, D: gl.constexpr):
    """A fragment of the j-th chunk of every lane: four words of its row in shared memory."""
    words = load_shared16(at + j * 64)
    if D < 32:  # past the head
        words = (
            gl.where(t < D // 8, words[0], 0),
            gl.where(t < D // 8, words[1], 0),
            gl.where(t < D // 8, words[2], 0),
            gl.where(t < D // 8, words[3], 0),
        )
    return words


@gluon.jit
def key_scores(q, keys, none, t, D: gl.constexpr, BLOCKS: gl.constexpr, STAGED: gl.constexpr):
    """Products of head g of this lane with keys 2 * t, 2 * t + 1 of each block.

    q: words of the chunks; where STAGED the shared memory that `load_queries` reads.
    """
    CHUNKS: gl.constexpr = (D + 31) // 32
    zero = none.to(gl.int32)
    scores = ()
    for b in gl.static_range(BLOCKS):
        s = (none, none, none, none)
        r = (none, none, none, none)  # a second chain, for latency
        for j in gl.static_range(CHUNKS):
            k = keys[b * CHUNKS + j]
            a = load_queries(q, j, t, D) if STAGED else q[j]
            s = mma(s, a[0], zero, a[1], zero, k[0], k[1])
            r = mma(r, a[2], zero, a[3], zero, k[2], k[3])
        scores = scores + (s[0] + r[0], s[1] + r[1])
    return scores


@gluon.jit
def visible(scores, row, end, t, scale, BLOCKS: gl.constexpr):
    """Scaled scores, without keys from `end` on."""
    out = ()
    for i in gl.static_range(2 * BLOCKS):
        inside = row + i // 2 * 8 + 2 * t + i % 2 < end
        out = out + (gl.where(inside, scores[i] * scale, float("-inf")),)
    return out


@gluon.jit
def online_softmax(top, total, scores):
    """Online softmax over new scores, in powers of two: top, total of this lane, fade, p.

    top is finite: the score of the new token to begin with.
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
def add_values(acc, fade, p, values, none, t, COLUMNS: gl.constexpr, BLOCKS: gl.constexpr):
    """Acc * fade + v^T @ p: columns 2 * u and 2 * u + 1 of chunks 8 * j + g, heads 2 * t and + 1.

    p, as the scores lie in the lanes, is a B fragment; fade is of head g, None for 1.
    """
    SETS: gl.constexpr = (COLUMNS + 63) // 64
    zero = none.to(gl.int32)
    b0 = bf16_pair(p[0], p[1])
    b1 = bf16_pair(p[2], p[3]) if BLOCKS == 2 else zero
    if fade is not None:
        even = from_lane(fade, t * 8)
        odd = from_lane(fade, t * 8 + 4)
    new = ()
    for j in gl.static_range(SETS):
        for u in gl.static_range(4):
            first = values[j][u]
            second = values[SETS + j][u]
            a0 = bytes_of(first, second, 0x5410)
            a1 = bytes_of(first, second, 0x7632)
            if BLOCKS == 2:
                third = values[2 * SETS + j][u]
                fourth = values[3 * SETS + j][u]
                a2 = bytes_of(third, fourth, 0x5410)
                a3 = bytes_of(third, fourth, 0x7632)
            else:
                a2 = zero
                a3 = zero
            c = acc[4 * j + u]
            if fade is not None:
                c = (c[0] * even, c[1] * odd, c[2] * even, c[3] * odd)
            new = new + (mma(c, a0, a1, a2, a3, b0, b1),)
    return new


@gluon.jit
def attend(
    top, total, acc, q, keys, values, rows, end, t, none, scale, D: gl.constexpr,
    COLUMNS: gl.constexpr, BLOCKS: gl.constexpr, STAGED: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Top, total and acc with all keys and values given, at once.

    keys, values, rows: as many as are taken together; FIRST: whether acc has nothing yet.
    """
    scores = ()
    for i in gl.static_range(len(keys)):
        products = key_scores(q, keys[i], none, t, D, BLOCKS, STAGED)
        scores = scores + visible(products, rows[i], end, t, scale, BLOCKS)
    top, total, fade, p = online_softmax(top, total, scores)
    if FIRST:
        fade = None
    for i in gl.static_range(len(keys)):
        own = p[2 * BLOCKS * i : 2 * BLOCKS * (i + 1)]
        acc = add_values(acc, fade, own, values[i], none, t, COLUMNS, BLOCKS)
        fade = None
    return top, total, acc
