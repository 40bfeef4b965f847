"""Device functions of attention over some blocks of keys: scores, online softmax, weighted values.

Lanes are those of `mma`: lane 4 * g + t. Query heads are rows of A and keys columns of B, both read
as chunks of 8 elements in natural order; scores then lie in the lanes as the B fragment that the
values multiply: lane's head g, keys 2 * t and 2 * t + 1 of each block of 8.

Every sum is an explicit `fma` or a plain add: kernels compile without fusion, so that each variant
of a kernel rounds alike. Where keys and values are INT8 codes (PLAN.coded), see `codes`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.attention.codes import (
    code_scores,
    digits_of_weights,
    fresh_scales,
    load_scales,
    row_of_codes,
    value_products,
)
from lowbit.runtime.kernels.attention.page_rows import row_number
from lowbit.runtime.kernels.ptx.memory import (
    load_shared8,
    load_shared16,
    stream8,
    stream8_or_any,
    stream16,
    stream16_if,
    stream16_or_any,
)
from lowbit.runtime.kernels.ptx.mma import across, bf16_pair, bytes_of, from_lane, mma, words_where


@gluon.jit
def load_keys(bases, page, row, end, g, t, wanted, PLAN: gl.constexpr):
    """B fragments of 8 keys a block: key g of this lane, chunks 4 * j + t of its elements.

    Behind those of codes follow their scales.

    bases: addresses of this head's keys and values in row 0 of page 0, and of their scales; row: of
    key g in the first block; wanted: the warps that load, others get zeros, of codes anything.
    None: all load.
    """
    BLOCKS: gl.constexpr = PLAN.keys.blocks
    CHUNKS: gl.constexpr = PLAN.chunks
    keys = ()
    for b in gl.static_range(BLOCKS):
        at = bases[0] + _number(page, row, b * 8, end, PLAN) * PLAN.row
        for j in gl.static_range(CHUNKS):
            chunk = at + gl.minimum(4 * j + t, PLAN.heads.dim * PLAN.size // 16 - 1) * 16
            keys = keys + (_stream16(chunk, wanted, PLAN),)
    if PLAN.quantized:
        keys = keys + (load_scales(bases, page, row, end, g, t, wanted, PLAN),)
    return keys


@gluon.jit
def load_values(bases, page, row, end, g, wanted, PLAN: gl.constexpr):
    """Pieces 8 * j + g of two values a block, of the keys whose scores this lane holds.

    bases: as in `load_keys`, but that of values of the first column that is loaded; row: of key
    2 * t in the first block; the rest as in `load_keys`.
    """
    BLOCKS: gl.constexpr = PLAN.keys.blocks
    LOADS: gl.constexpr = PLAN.loads
    values = ()
    for b in gl.static_range(BLOCKS):
        for i in gl.static_range(2):
            at = bases[1] + _number(page, row, b * 8 + i, end, PLAN) * PLAN.row
            for j in gl.static_range(LOADS):
                piece = at + _piece(j, g, PLAN)
                if PLAN.piece == 8:
                    one = stream8(piece) if wanted is None else stream8_or_any(piece, wanted)
                else:
                    one = _stream16(piece, wanted, PLAN)
                values = values + (one,)
    return values


@gluon.jit
def _stream16(address, wanted, PLAN: gl.constexpr):
    """16 bytes in lanes that want them; None: all. The others get zeros, of codes anything."""
    if wanted is None:
        words = stream16(address)
    elif PLAN.quantized:
        words = stream16_or_any(address, wanted)
    else:
        words = stream16_if(address, wanted)
    return words


@gluon.jit
def _number(page, row, i: gl.constexpr, end, PLAN: gl.constexpr):
    """`row_number` of the i-th row after one; of codes also of rows past the end, see `codes`."""
    if PLAN.quantized:
        number = row_of_codes(page, row) + i
    else:
        number = row_number(page, row + i, end)
    return number


@gluon.jit
def _piece(j: gl.constexpr, g, PLAN: gl.constexpr):
    """Bytes from a program's first column to the j-th piece that a lane loads of a value."""
    LAST: gl.constexpr = PLAN.columns * PLAN.size // PLAN.piece - 1
    return gl.minimum(8 * j + g, LAST) * PLAN.piece


@gluon.jit
def with_fresh_keys(keys, buffer, row, end, first, position, g, t, PLAN: gl.constexpr):
    """Replace keys of rows from `first` on, which this step appends, by those in shared memory.

    row: as in `load_keys`; buffer: shared memory, see `stage_heads`; behind the key at `position`
    lies the key one row earlier.
    """
    staged = buffer + PLAN.key_row * PLAN.staged + t * 16
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
    if PLAN.quantized:
        scales = keys[BLOCKS * CHUNKS]
        new = new + (fresh_scales(scales, buffer, row, end, first, position, g, t, PLAN),)
    return new


@gluon.jit
def with_fresh_values(values, value, row, end, first, position, g, PLAN: gl.constexpr):
    """Replace values of rows from `first` on, which this step appends, by those of its input.

    value: address of the value at `position`, first column; codes are those in shared memory.
    """
    BLOCKS: gl.constexpr = PLAN.keys.blocks
    LOADS: gl.constexpr = PLAN.loads
    WORDS: gl.constexpr = PLAN.piece // 4
    new = ()
    for b in gl.static_range(BLOCKS):
        for i in gl.static_range(2):
            r = gl.maximum(gl.minimum(row + b * 8 + i, end - 1), 0)
            fresh = r >= first
            if PLAN.quantized:
                at = value[0] + gl.where(fresh, position - r, 0) * PLAN.staged
            else:
                at = value - gl.where(fresh, position - r, 0).to(gl.int64) * (2 * PLAN.width)
            for j in gl.static_range(LOADS):
                piece = at + _piece(j, g, PLAN)
                if not PLAN.quantized:
                    words = stream16_if(piece, fresh)
                elif PLAN.piece == 8:
                    words = load_shared8(piece)
                else:
                    words = load_shared16(piece)
                old = values[(2 * b + i) * LOADS + j]
                one = ()
                for w in gl.static_range(WORDS):
                    one = one + (gl.where(fresh, words[w], old[w]),)
                new = new + (one,)
    return new


@gluon.jit
def load_queries(at, j: gl.constexpr, t, PLAN: gl.constexpr):
    """A fragment of the j-th chunk of every lane: four words of its row in shared memory."""
    words = load_shared16(at + j * 64)
    if PLAN.heads.dim * PLAN.size < 64:  # past the head
        words = words_where(t < PLAN.heads.dim * PLAN.size // 16, words)
    return words


@gluon.jit
def key_scores(q, keys, zero_f32, t, PLAN: gl.constexpr):
    """Products of head g of this lane with keys 2 * t, 2 * t + 1 of each block.

    q: words of the chunks; of wide heads, where they would be too many registers, the shared memory
    that `load_queries` reads.

    Returns:
        The products; of codes also what the weights of those keys are multiplied by.
    """
    if PLAN.quantized:
        found = code_scores(q, keys, zero_f32, t, PLAN)
    else:
        found = (_bf16_scores(q, keys, zero_f32, t, PLAN), ())
    return found


@gluon.jit
def _bf16_scores(q, keys, zero_f32, t, PLAN: gl.constexpr):
    CHUNKS: gl.constexpr = PLAN.chunks
    zero = zero_f32.to(gl.int32)
    scores = ()
    for b in gl.static_range(len(keys) // CHUNKS):
        s = (zero_f32, zero_f32, zero_f32, zero_f32)
        r = (zero_f32, zero_f32, zero_f32, zero_f32)  # a second chain, for latency
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
    """Online softmax over new scores, in powers of two: top, total of this lane, fade, p, highest.

    top is finite: the score of the new token to begin with. Scores that are all hidden change
    nothing, not even in the last bit. highest: of the p of all lanes of the head.
    """
    new = scores[0]
    for i in gl.static_range(1, len(scores)):
        new = gl.maximum(new, scores[i])
    new = gl.maximum(new, across(new, 1))
    new = gl.maximum(new, across(new, 2))
    new_top = gl.maximum(top, new)
    fade = gl.exp2(top - new_top)
    total = total * fade
    p = ()
    for i in gl.static_range(len(scores)):
        one = gl.exp2(scores[i] - new_top)
        total += one
        p = p + (one,)
    return new_top, total, fade, p, gl.exp2(new - new_top)


@gluon.jit
def add_values(acc, fade, p, highest, shares, values, zero_f32, t, PLAN: gl.constexpr):
    """Acc * fade + v^T @ p: columns 2 * u and 2 * u + 1 of chunks 8 * j + g, heads 2 * t and + 1.

    p, as the scores lie in the lanes, is a B fragment; highest: of `online_softmax`; shares: see
    `key_scores`; fade is that of head g. None: acc is zero.
    """
    b = weight_words(p, highest, shares, zero_f32, PLAN)
    if fade is not None:
        even = from_lane(fade, t * 8)
        odd = from_lane(fade, t * 8 + 4)
    if PLAN.quantized:
        even_unit = from_lane(b[1], t * 8)
        odd_unit = from_lane(b[1], t * 8 + 4)
    new = ()
    for quad in gl.static_range(4 * PLAN.sets):
        c = acc[quad]
        if fade is not None:
            c = (c[0] * even, c[1] * odd, c[2] * even, c[3] * odd)
        if PLAN.quantized:
            n = value_products(values, quad, b[0], zero_f32, PLAN)
            low = gl.fma(n[0], even_unit, c[0]), gl.fma(n[1], odd_unit, c[1])
            c = low + (gl.fma(n[2], even_unit, c[2]), gl.fma(n[3], odd_unit, c[3]))
        else:
            c = add_column(c, values, quad, b[0], zero_f32, PLAN)
        new = new + (c,)
    return new


@gluon.jit
def weight_words(p, highest, shares, zero_f32, PLAN: gl.constexpr):
    """Weights of a turn's keys as the B fragment that values are multiplied by, and its unit."""
    if PLAN.quantized:
        found = digits_of_weights(p, highest, shares)
    else:
        words = ()
        for b in gl.static_range(len(p) // 2):
            words = words + (bf16_pair(p[2 * b], p[2 * b + 1]),)
        if len(p) == 2:
            words = words + (zero_f32.to(gl.int32),)
        found = (words, zero_f32 + 1.0)
    return found


@gluon.jit
def add_column(c, values, quad: gl.constexpr, b, zero_f32, PLAN: gl.constexpr):
    """C + v^T @ p of the columns of a quad, in BF16; b: words of `weight_words`."""
    SETS: gl.constexpr = PLAN.sets
    first = values[quad // 4][quad % 4]
    second = values[SETS + quad // 4][quad % 4]
    a0 = bytes_of(first, second, 0x5410)
    a1 = bytes_of(first, second, 0x7632)
    a2 = zero_f32.to(gl.int32)
    a3 = a2
    if PLAN.keys.blocks == 2:
        third = values[2 * SETS + quad // 4][quad % 4]
        fourth = values[3 * SETS + quad // 4][quad % 4]
        a2 = bytes_of(third, fourth, 0x5410)
        a3 = bytes_of(third, fourth, 0x7632)
    return mma(c, a0, a1, a2, a3, b[0], b[1])
