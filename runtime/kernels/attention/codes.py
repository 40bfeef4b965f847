"""Device functions of attention over INT8 keys and values, which `fragments` and `program` call.

A vector of a token and kv head is D codes, a byte each, and a scale in BF16 (`formats.kv_cache`).

Scores  Queries become numbers of 16 bits, q = s * (256 * high + low): their upper bytes are the
        rows g of A, their lower bytes the rows g + 8, which BF16 leaves empty. So one product of
        integers multiplies both, exactly, and keys are used as they are loaded. |error| of an
        element is at most max|q| / 65278; BF16 has |q| / 256
Values  Weights of 32 keys, times the scales of their values, become integers of up to 2^14, of two
        such bytes: w = unit * (256 * high + low) with a power of two as unit. Bytes of four keys
        are put side by side, two instructions for four codes, and products are exact again.
        |error| of a weight is at most 2^-14 of the largest weight times the largest scale of the
        32 keys; BF16 has 2^-9 of its own

Lane 4 * g + t loads the scales of key 4 * g + t of the warp's 32, that of the key in the lower half
of a word, and hands them to the lanes that have the key's scores. A token's heads stand in shared
memory: queries, whose upper and lower bytes take turns, 2 * PLAN.staged bytes apart; codes of keys,
of values (of the token itself first, then of earlier tokens of the step), PLAN.staged bytes apart;
then all their scales.

Rows past the end of a sequence are read as they are, in its last page: their scores are hidden, and
their values have no scale.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.attention.page_rows import PAGE_ROWS
from lowbit.runtime.kernels.attention.rotate_heads import rotated
from lowbit.runtime.kernels.ptx.memory import (
    load_shared4,
    load_shared16,
    store_shared2,
    store_shared4,
)
from lowbit.runtime.kernels.ptx.mma import (
    as_float,
    as_word,
    bytes_of,
    from_lane,
    high_half,
    integer_mma,
    largest,
    low_half,
    nearest,
    quotient,
    words_where,
)

MOST_CODE = gl.constexpr(127.0)
INFINITY = gl.constexpr(0x7F800000)
MOST_DIGITS = gl.constexpr(32639.0)  # 256 * 127 + 127
DIGIT_BITS = gl.constexpr(13)  # of the integer of the largest weight, but for the first
LEAST = gl.constexpr(0x0D800000)  # bits of 2^-100
NOT_A_NUMBER = gl.constexpr(0x7FC00000)
ROUNDER = gl.constexpr(1.5 * 2**23)


@gluon.jit
def load_scales(bases, page, row, end, g, t, wanted, PLAN: gl.constexpr):
    """The scales of key 4 * g + t and of its value in a word; row: of key g.

    bases: keys, values, scales of keys and of values of this head in row 0 of page 0.

    Those of rows from `end` on are zeros.
    """
    at = row_of_codes(page, row + 3 * g + t) * PLAN.stored
    if wanted is None:
        k = gl.load(bases[2] + at)
        v = gl.load(bases[3] + at)
    else:
        k = gl.load(bases[2] + at, mask=wanted, other=0.0)
        v = gl.load(bases[3] + at, mask=wanted, other=0.0)
    both = _two_scales(k.to(gl.float32), v.to(gl.float32))
    return gl.where(row + 3 * g + t < end, both, 0)


@gluon.jit
def row_of_codes(page, row):
    """Number of a row among those of all pages, whether or not it is before the end."""
    return (page * PAGE_ROWS + (row & (PAGE_ROWS - 1))).to(gl.int64)


@gluon.jit
def _two_scales(k, v):
    return bytes_of(as_word(k), as_word(v), 0x7632)


@gluon.jit
def stage_codes(
    qkv, key, bases, new_page, new_at, rotations, buffer, place, thread, eps, PLAN: gl.constexpr
):  # fmt: skip
    """Leave queries, keys and values of this step in shared memory, as codes, a warp a head.

    The first of a head's programs also appends the codes of the token and their scales. Arguments
    are those of `score_new_key`.
    """
    SHARED: gl.constexpr = PLAN.heads.shared
    KEYS_END: gl.constexpr = PLAN.heads.shared + PLAN.tokens_per_sequence
    HELD: gl.constexpr = PLAN.held
    WARPS: gl.constexpr = PLAN.running
    D: gl.constexpr = PLAN.heads.dim
    HALF: gl.constexpr = gl.pointer_type(gl.int16)
    warp, lane, _, zero_f32 = thread
    head, token, position, _ = place
    angles, gains = rotations
    scales_at = buffer + PLAN.scales_at
    new_scale = (new_page * PAGE_ROWS + (position & (PAGE_ROWS - 1))).to(gl.int64) * PLAN.stored
    writes = gl.program_id(2) == 0
    for i in gl.static_range(0, HELD, WARPS):
        row = i + warp
        there = row < HELD
        of_query = row < SHARED
        of_value = row >= KEYS_END
        back = gl.where(of_value, row - KEYS_END, gl.maximum(row - SHARED, 0))
        x = gl.where(of_value, key + PLAN.stored * D, key)
        x = gl.where(of_query, (head * SHARED + row) * PLAN.query, x).to(gl.int64)
        x -= gl.minimum(back, token).to(gl.int64) * PLAN.width
        angle = angles[i // WARPS if PLAN.tokens_per_sequence > 1 else 0]
        y = rotated(qkv + x * 2, gains[i // WARPS], angle, lane, zero_f32, eps, PLAN, of_value)
        bits = lane * 0
        for j in gl.static_range(len(y)):
            bits = gl.maximum(bits, as_word(y[j]) & 0x7FFFFFFF)
        bits = largest(bits)  # a NaN is larger than all numbers
        most = as_float(bits)
        stored = as_float(as_word(quotient(most, MOST_CODE)) + 0xFFFF >> 16 << 16)
        stored = gl.where(bits > INFINITY, most, stored)
        scale = gl.where(of_query, quotient(most, MOST_DIGITS), stored)
        store_shared4(scales_at + row * 4, scale, there & (lane == 0))
        new = writes & there & (row == SHARED)
        new_value = writes & there & (row == KEYS_END)
        codes_at = (gl.where(new_value, bases[1], bases[0]) + new_at).to(HALF, bitcast=True)
        for j in gl.static_range(len(y) // 2):
            a = nearest(quotient(y[2 * j], scale))
            b = nearest(quotient(y[2 * j + 1], scale))
            word = lane + 32 * j
            inside = there & (word < D // 2)
            part = word % 8 // 2  # of a chunk: its words of four codes
            half = (part // 2) ^ (row & 1)
            at = row * (2 * PLAN.staged) + word // 8 * 32 + half * 16 + part % 2 * 8 + word % 2 * 2
            of_other = (SHARED + row) * PLAN.staged + word * 2
            low = bytes_of(a, b, 0x4040)
            store_shared2(buffer + at, bytes_of(a + 128, b + 128, 0x5151), inside & of_query)
            store_shared2(buffer + gl.where(of_query, at + 4, of_other), low, inside)
            gl.store(codes_at + word, low.to(gl.int16), mask=inside & (new | new_value))
        for s in gl.static_range(2):
            to = bases[2 + s] + new_scale
            once = (new_value if s == 1 else new) & (lane == 0)
            gl.store(to, scale.to(bases[2 + s].dtype.element_ty), mask=once)


@gluon.jit
def staged_scale(buffer, row, PLAN: gl.constexpr):
    """The scale of a head in shared memory: queries, then keys, then values."""
    return load_shared4(buffer + PLAN.scales_at + row * 4)


@gluon.jit
def query_places(buffer, row, t, PLAN: gl.constexpr):
    """Places of a lane's fragments of a query: the first and the last 8 of its 16 elements.

    The halves of a chunk are swapped in every second query, whose lanes would share banks.
    """
    at = buffer + row * (2 * PLAN.staged) + t * 32
    swapped = (row & 1) * 16
    return at + swapped, at + 16 - swapped


@gluon.jit
def _digits(at, j: gl.constexpr, t, PLAN: gl.constexpr):
    """Words of upper and lower bytes in turn, of half of the j-th chunk of a query."""
    words = load_shared16(at, j * 128)
    if PLAN.heads.dim < 64:  # past the head
        words = words_where(t < PLAN.heads.dim // 16, words)
    return words


@gluon.jit
def code_scores(q, keys, zero_f32, t, PLAN: gl.constexpr):
    """`key_scores` of codes, and the scales of the values of those keys; then the largest of all.

    q: places of the query in shared memory, and its scale.
    """
    CHUNKS: gl.constexpr = PLAN.chunks
    BLOCKS: gl.constexpr = (len(keys) - 1) // CHUNKS
    first, second, scale = q
    zero = zero_f32.to(gl.int32)
    sums = ()
    for _ in gl.static_range(BLOCKS):
        sums = sums + ((zero, zero, zero, zero),)
    for j in gl.static_range(CHUNKS):
        a = _digits(first, j, t, PLAN)
        c = _digits(second, j, t, PLAN)
        new = ()
        for b in gl.static_range(BLOCKS):
            k = keys[b * CHUNKS + j]
            s = integer_mma(sums[b], a[0], a[1], a[2], a[3], k[0], k[1])
            new = new + (integer_mma(s, c[0], c[1], c[2], c[3], k[2], k[3]),)
        sums = new
    scores = ()
    shares = ()
    for b in gl.static_range(BLOCKS):
        for i in gl.static_range(2):
            both = as_word(from_lane(as_float(keys[len(keys) - 1]), 8 * b + 2 * t + i))
            product = _of_digits(sums[b][i], sums[b][2 + i])
            scores = scores + (product * (low_half(both) * scale),)
            shares = shares + (high_half(both),)
    return scores, shares + (as_float(largest(keys[len(keys) - 1] >> 16 & 0x7FFF) << 16),)


@gluon.jit
def _of_digits(high, low):
    """A product in FP32 from those of the upper and the lower bytes."""
    return ((high << 8) + low).to(gl.float32)


@gluon.jit
def fresh_scales(scales, buffer, row, end, first, position, g, t, PLAN: gl.constexpr):
    """Scales of keys and values, with those that this step appends: rows from `first` on."""
    r = gl.maximum(gl.minimum(row + 3 * g + t, end - 1), 0)
    fresh = r >= first
    at = PLAN.heads.shared + gl.where(fresh, position - r, 0)
    k = staged_scale(buffer, at, PLAN)
    v = staged_scale(buffer, at + PLAN.tokens_per_sequence, PLAN)
    return gl.where(fresh, _two_scales(k, v), scales)


@gluon.jit
def new_columns(value, d, PLAN: gl.constexpr):
    """Two values of the token from shared memory, columns d and d + 1.

    value: where their codes begin, and their scale.
    """
    at, scale = value
    word = as_word(load_shared4(at + (d & -4))) >> ((d & 2) * 8)
    low = (word << 24 >> 24).to(gl.float32) * scale
    high = (word << 16 >> 24).to(gl.float32) * scale
    return low, high


@gluon.jit
def digits_of_weights(p, highest, shares):
    """Weights of 32 keys and head g times the scales of their values, as two bytes and a unit.

    p: of the lane's keys; highest: of all; shares: of `code_scores`.

    Returns:
        Words of upper and lower bytes of the first 16 keys, then of the last, as fragments of B
        with the keys in the order of `value_products`; and the unit, NaN where a scale is.
    """
    most = as_word(highest * shares[8])  # none is above, and it waits for no other lane
    power = (gl.maximum(most, LEAST) & INFINITY) - (DIGIT_BITS << 23)
    unit = as_float(gl.where(most >= INFINITY, NOT_A_NUMBER, power))
    inverse = as_float((254 << 23) - power)
    low = ()
    high = ()
    for i in gl.static_range(8):
        x = gl.fma(p[i] * shares[i], inverse, ROUNDER)  # an integer in the last bits
        low = low + (as_word(x),)
        high = high + (as_word(x + 128.0),)
    words = ()
    for i in gl.static_range(2):
        words = words + (_four(high, 4 * i, 0x0051), _four(low, 4 * i, 0x0040))
    return words, unit


@gluon.jit
def _four(words, i: gl.constexpr, SELECTED: gl.constexpr):
    """A byte each of four words from the i-th on."""
    first = bytes_of(words[i], words[i + 1], SELECTED)
    second = bytes_of(words[i + 2], words[i + 3], SELECTED)
    return bytes_of(first, second, 0x5410)


@gluon.jit
def _two_rows(values, key: gl.constexpr, quad: gl.constexpr, PLAN: gl.constexpr):
    """The bytes of two keys' values side by side, for both columns of a quad."""
    LOADS: gl.constexpr = PLAN.loads
    QUADS: gl.constexpr = PLAN.piece // 2  # of a load
    first = values[key * LOADS + quad // QUADS][quad % QUADS // 2]
    second = values[(key + 1) * LOADS + quad // QUADS][quad % QUADS // 2]
    return bytes_of(first, second, 0x5140 if quad % 2 == 0 else 0x7362)


@gluon.jit
def value_products(values, quad: gl.constexpr, words, zero_f32, PLAN: gl.constexpr):
    """Sums of values of 32 keys times their weights, for the columns of a quad, in units.

    words: of `digits_of_weights`.
    """
    zero = zero_f32.to(gl.int32)
    high = (zero, zero, zero, zero)
    low = high
    a = ()
    for i in gl.static_range(2):
        two = _two_rows(values, 4 * i, quad, PLAN)
        more = _two_rows(values, 4 * i + 2, quad, PLAN)
        a = a + (bytes_of(two, more, 0x5410), bytes_of(two, more, 0x7632))
    high = integer_mma(high, *a, words[0], words[2])
    low = integer_mma(low, *a, words[1], words[3])
    sums = ()
    for i in gl.static_range(4):
        sums = sums + (_of_digits(high[i], low[i]),)
    return sums
