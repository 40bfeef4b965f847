"""Device functions shared by both kernels of `attention_decode`, in the order of their use.

`softmax` is the state of a lane's online softmax: sums of weighted values, the highest score and
the sum of weights. `fresh` locates the keys of this step: the first position that it appends, the
token's own position, the address of its value, and the shared memory with its heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.attention.codes import (
    new_columns,
    query_places,
    stage_codes,
    staged_scale,
)
from lowbit.runtime.kernels.attention.fragments import (
    add_values,
    key_scores,
    load_keys,
    load_queries,
    load_values,
    online_softmax,
    visible,
    with_fresh_keys,
    with_fresh_values,
)
from lowbit.runtime.kernels.attention.page_rows import PAGE_ROWS, page_of
from lowbit.runtime.kernels.attention.rotate_heads import load_angles, load_head_gains, rotated
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    floats,
    load4,
    load_shared16,
    store_shared4,
    store_shared16,
)
from lowbit.runtime.kernels.ptx.mma import (
    across,
    as_float,
    as_word,
    from_lane,
    high_half,
    low_half,
)


@gluon.jit
def first_fresh(rows_ptr, token, row, position, PLAN: gl.constexpr):
    """The position of the sequence's first token in this step: its tokens stand side by side."""
    TOGETHER: gl.constexpr = PLAN.tokens_per_sequence
    same = True
    first = position
    for i in gl.static_range(1, TOGETHER):
        same = same & (token >= i) & (gl.load(rows_ptr + gl.maximum(token - i, 0)) == row)
        first -= same.to(gl.int32)
    return first


@gluon.jit
def kv_head(head, PLAN: gl.constexpr):
    """The kv head in pages of a program's head: see `in_programs`."""
    if PLAN.readers > 1:
        head = head // PLAN.readers
    return head


@gluon.jit
def bases_of(page_ptrs, head, column, PLAN: gl.constexpr):
    """Where a head begins in row 0 of page 0: keys, a column of values, and of codes the scales."""
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr = page_ptrs
    WIDTH: gl.constexpr = PLAN.heads.dim * PLAN.size
    head = kv_head(head, PLAN)
    bases = (
        k_ptr.to(gl.int64, bitcast=True) + head * WIDTH,
        v_ptr.to(gl.int64, bitcast=True) + head * WIDTH + column * PLAN.size,
    )
    if PLAN.quantized:
        bases = bases + (k_scales_ptr + head, v_scales_ptr + head)
    return bases


@gluon.jit
def load_rotations(rope_ptrs, angle, warp, lane, zero, PLAN: gl.constexpr):
    """Angles and gains of the heads that a warp stages, in its turns; angle: of the token."""
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr = rope_ptrs
    SHARED: gl.constexpr = PLAN.heads.shared
    HELD: gl.constexpr = PLAN.held
    WARPS: gl.constexpr = PLAN.running
    cos = cos_ptr.to(gl.int64, bitcast=True)
    sin = sin_ptr.to(gl.int64, bitcast=True)
    q_gain = zero.to(gl.int64)
    k_gain = q_gain
    if PLAN.normed:
        q_gain += q_norm_ptr.to(gl.int64, bitcast=True)
        k_gain += k_norm_ptr.to(gl.int64, bitcast=True)
    angles = ()
    gains = ()
    for i in gl.static_range(0, HELD, WARPS):
        back = gl.maximum(i + warp - SHARED, 0)
        if i == 0 or PLAN.tokens_per_sequence > 1:
            at = gl.maximum(angle - back, 0)
            angles = angles + (load_angles(cos, sin, at, lane, PLAN),)
        gain = gl.where(i + warp < SHARED, q_gain, k_gain)
        gains = gains + (load_head_gains(gain, lane, PLAN),)
    return angles, gains


@gluon.jit
def stage_heads(
    qkv, key, k_base, new_at, rotations, buffer, head, token, warp, lane, zero_f32, eps,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Leave queries, the new key and those of earlier tokens of this step in shared memory.

    They are normed and rotated, a warp a head. The first of a head's programs also appends the key.

    qkv: address of the token; key: element where its key begins; k_base: address of the keys in the
    pages; new_at: bytes from there to the token's own row.
    """
    SHARED: gl.constexpr = PLAN.heads.shared
    HELD: gl.constexpr = PLAN.held
    WARPS: gl.constexpr = PLAN.running
    D: gl.constexpr = PLAN.heads.dim
    WORD: gl.constexpr = gl.pointer_type(gl.int32)
    angles, gains = rotations
    for i in gl.static_range(0, HELD, WARPS):
        row_of = i + warp
        x = gl.where(row_of < SHARED, (head * SHARED + row_of) * PLAN.query, key).to(gl.int64)
        if PLAN.tokens_per_sequence > 1:
            back = gl.minimum(gl.maximum(row_of - SHARED, 0), token)
            x -= back.to(gl.int64) * PLAN.width
        angle = angles[i // WARPS if PLAN.tokens_per_sequence > 1 else 0]
        words = rotated(qkv + x * 2, gains[i // WARPS], angle, lane, zero_f32, eps, PLAN)
        for j in gl.static_range((D + 63) // 64):
            word = lane + 32 * j
            inside = (row_of < HELD) & (word < D // 2)
            store_shared4(buffer + row_of * PLAN.staged + word * 4, as_float(words[j]), inside)
            mine = inside & (row_of == SHARED) & (gl.program_id(2) == 0)
            gl.store((k_base + new_at).to(WORD, bitcast=True) + word, words[j], mask=mine)


@gluon.jit
def score_new_key(
    qkv, key, bases, new_page, rotations, keys, values, rows, value, place, buffer, thread, eps,
    scale, PLAN: gl.constexpr,
):  # fmt: skip
    """Stage the heads and score the new key: the first work that needs this step's input.

    qkv: address of the token; key: element where its key begins; bases: addresses of keys and
    values in the pages, and of their scales; new_page: the page of the token's own row; keys,
    values: of the first turn; rows: the warp's first, those before which the split and the turn
    end; value: address of the new value, or for codes the program's first column; place: head,
    token, position and the first that this step appends; buffer: shared memory.

    Returns:
        Queries, the score of the new key, keys and values, `fresh`, the rest of shared memory, and
        the bytes from row 0 of page 0 to the token's own row.
    """
    CHUNKS: gl.constexpr = PLAN.chunks
    warp, lane, _, zero_f32 = thread
    row, end, until = rows
    head, token, position, first = place
    heads = buffer
    g = lane // 4
    t = lane % 4
    staged = buffer + PLAN.key_row * PLAN.staged + t * 16
    new_at = new_page.to(gl.int64) * (PAGE_ROWS * PLAN.row)
    new_at += (position & (PAGE_ROWS - 1)).to(gl.int64) * PLAN.row
    if PLAN.quantized:
        stage_codes(
            qkv, key, bases, new_page, new_at, rotations, buffer, place, thread, eps, PLAN
        )  # fmt: skip
    else:
        stage_heads(
            qkv, key, bases[0], new_at, rotations, buffer, head, token, warp, lane, zero_f32, eps,
            PLAN,
        )  # fmt: skip
        if PLAN.tokens_per_sequence > 1 and len(keys) > 0:
            any_fresh = until > first
            if any_fresh:
                values = with_fresh_values(
                    values, value, row + 2 * t, end, first, position, g, PLAN
                )  # fmt: skip
    barrier()
    q = buffer + gl.minimum(g, PLAN.most_row) * PLAN.staged + t * 16
    new_key = ()
    for j in gl.static_range(CHUNKS):
        new_key = new_key + (load_queries(staged, j, t, PLAN),)
    if PLAN.heads.dim <= 128 and not PLAN.quantized:
        q_at = q
        q = ()
        for j in gl.static_range(CHUNKS):
            q = q + (load_queries(q_at, j, t, PLAN),)
    if PLAN.quantized:
        row_of = gl.minimum(g, PLAN.most_row)
        first_half, second_half = query_places(heads, row_of, t, PLAN)
        q = (first_half, second_half, staged_scale(heads, row_of, PLAN))
        k_scale = staged_scale(heads, PLAN.heads.shared + lane * 0, PLAN)
        new_key = new_key + (as_word(k_scale) >> 16,)
        at = heads + (PLAN.key_row + PLAN.tokens_per_sequence) * PLAN.staged + value
        scale_row = PLAN.heads.shared + PLAN.tokens_per_sequence + lane * 0
        value = (at, staged_scale(heads, scale_row, PLAN))
    buffer += PLAN.heads_bytes
    first_score = key_scores(q, new_key, zero_f32, t, PLAN)[0]
    new_score = from_lane(first_score[0] * scale, g * 4)  # every column is the new key
    if PLAN.tokens_per_sequence > 1 and len(keys) > 0:
        any_fresh = until > first
        if any_fresh:
            keys = with_fresh_keys(keys, heads, row + g, end, first, position, g, t, PLAN)
            if PLAN.quantized:
                values = with_fresh_values(
                    values, value, row + 2 * t, end, first, position, g, PLAN
                )  # fmt: skip
    fresh = (first, position, value, heads)
    return q, new_score, keys, values, fresh, buffer, new_at


@gluon.jit
def with_fresh(keys, values, row, end, until, fresh, g, t, PLAN: gl.constexpr):
    """Keys and values of a turn, with those that this step appends where rows up to `until` are."""
    first, position, value, heads = fresh
    if PLAN.tokens_per_sequence > 1:
        any_fresh = until > first
        if any_fresh:
            values = with_fresh_values(values, value, row + 2 * t, end, first, position, g, PLAN)
            keys = with_fresh_keys(keys, heads, row + g, end, first, position, g, t, PLAN)
    return keys, values


@gluon.jit
def nothing_yet(top, zero_f32, PLAN: gl.constexpr):
    """The softmax before any keys but the new one."""
    QUADS: gl.constexpr = 4 * PLAN.sets
    acc = ()
    for _ in gl.static_range(QUADS):
        acc = acc + ((zero_f32, zero_f32, zero_f32, zero_f32),)
    return acc, top, zero_f32


@gluon.jit
def attend_turns(
    row, next_page, keys, values, softmax, q, bases, table, span, fresh, g, t, zero_f32, scale,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Attend to all turns but the last, each loaded during the one before.

    row: the warp's first; next_page: of the second turn; keys, values: of the first turn; bases:
    addresses of keys and values in the pages, and of their scales; span: first row, the one before
    which it ends and rows from turn to turn.

    Returns:
        The softmax; keys, values and row of the last turn.
    """
    acc, top, total = softmax
    start, end, stride = span
    for at in range(start, end - stride, stride):
        scores, shares = key_scores(q, keys, zero_f32, t, PLAN)
        keys = load_keys(bases, next_page, row + stride + g, end, g, t, None, PLAN)
        page = next_page
        next_page = page_of(table, row + 2 * stride, end)
        scores = visible(scores, row, end, t, scale)
        top, total, fade, p, highest = online_softmax(top, total, scores)
        acc = add_values(acc, fade, p, highest, shares, values, zero_f32, t, PLAN)
        row += stride
        values = load_values(bases, page, row + 2 * t, end, g, None, PLAN)
        until = at + stride + PLAN.turn
        keys, values = with_fresh(keys, values, row, end, until, fresh, g, t, PLAN)
    return (acc, top, total), keys, values, row


@gluon.jit
def attend(
    softmax, q, keys, values, row, end, t, zero_f32, scale, FIRST: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """The softmax with one turn of keys and values; FIRST: it has only the new token's score."""
    acc, top, total = softmax
    scores, shares = key_scores(q, keys, zero_f32, t, PLAN)
    scores = visible(scores, row, end, t, scale)
    top, total, fade, p, highest = online_softmax(top, total, scores)
    acc = add_values(acc, None if FIRST else fade, p, highest, shares, values, zero_f32, t, PLAN)
    return acc, top, total


@gluon.jit
def own_sums(buffer, g, t, COUNT: gl.constexpr, PLAN: gl.constexpr):
    """Address of this lane's first sums in shared memory, of warp or split 0 of COUNT."""
    PAIRS: gl.constexpr = (PLAN.heads.shared + 1) // 2
    return buffer + 64 * COUNT + (g * PAIRS + gl.minimum(t, PAIRS - 1)) * 16


@gluon.jit
def leave_warp(softmax, buffer, sums_at, warp, g, t, PLAN: gl.constexpr):
    """Leave a warp's sums, its highest score and sum of weights where `weigh_warps` finds them.

    softmax: of head g; buffer: shared memory for 16 numbers of each warp and then the sums;
    sums_at: of this lane's, see `own_sums`.
    """
    WARPS: gl.constexpr = PLAN.warps
    PAIRS: gl.constexpr = (PLAN.heads.shared + 1) // 2  # of heads: lanes from there hold nothing
    acc, top, total = softmax
    total += across(total, 1)
    total += across(total, 2)
    totals_at = buffer + 32 * WARPS
    mine = (g * WARPS + warp) * 4
    store_shared4(buffer + mine, top, t == 0)
    store_shared4(totals_at + mine, total, t == 0)
    for quad in gl.static_range(len(acc)):
        c = acc[quad]
        words = (as_word(c[0]), as_word(c[1]), as_word(c[2]), as_word(c[3]))
        store_shared16(sums_at + (warp * len(acc) + quad) * (128 * PAIRS), words, t < PAIRS)


@gluon.jit
def weigh_warps(new_score, own_new, buffer, t, PLAN: gl.constexpr):
    """Weights of each warp's sums in its group, for heads 2 * t and 2 * t + 1; see `leave_warp`.

    new_score: of head g; own_new: whether the new token counts here.

    Returns:
        Highest score and sum of weights of every group, the weight of every warp's sums, each of
        the second head after the first; that of the new value, which the first group counts.
    """
    WARPS: gl.constexpr = PLAN.warps
    GROUPS: gl.constexpr = PLAN.groups
    totals_at = buffer + 32 * WARPS
    barrier()
    tops = ()
    wholes = ()
    weights = ()
    news = ()
    EACH: gl.constexpr = WARPS // GROUPS
    for i in gl.static_range(2):
        of_head = (2 * t + i) * (4 * WARPS)
        own = floats(buffer + of_head, WARPS)
        totals = floats(totals_at + of_head, WARPS)
        new_of = from_lane(new_score, t * 8 + 4 * i)
        for n in gl.static_range(GROUPS):
            highest = new_of
            for w in gl.static_range(n * EACH, (n + 1) * EACH):
                highest = gl.maximum(highest, own[w])
            whole = gl.exp2(new_of - highest)
            if n == 0:
                whole = gl.where(own_new, whole, 0.0)
                news = news + (whole,)
            else:
                whole = whole * 0.0
            for w in gl.static_range(n * EACH, (n + 1) * EACH):
                weight = gl.exp2(own[w] - highest)
                whole = gl.fma(weight, totals[w], whole)
                weights = weights + (weight,)
            tops = tops + (highest,)
            wholes = wholes + (whole,)
    return tops, wholes, weights, news


@gluon.jit
def element_of(quad, g, PLAN: gl.constexpr):
    """The first of the two columns of a part that a lane sums in its quad."""
    EACH: gl.constexpr = PLAN.piece // PLAN.size  # columns of a load
    return (quad // (EACH // 2) * 8 + g) * EACH + quad % (EACH // 2) * 2


@gluon.jit
def new_pair(value, d, PLAN: gl.constexpr):
    """Columns d and d + 1 of the new value, for `of_pair`; value: see `score_new_key`."""
    if PLAN.quantized:
        pair = new_columns(value, d, PLAN)
    else:
        pair = load4(value + d.to(gl.int64) * 2)
    return pair


@gluon.jit
def of_pair(pair, i: gl.constexpr, PLAN: gl.constexpr):
    """The first or second column of a `new_pair` in FP32."""
    if PLAN.quantized:
        x = pair[i]
    elif i == 0:
        x = low_half(pair)
    else:
        x = high_half(pair)
    return x


@gluon.jit
def append_pair(v_base, new_at, d, pair, mine, PLAN: gl.constexpr):
    """Store two columns of the new value in its page; codes are there already."""
    WORD: gl.constexpr = gl.pointer_type(gl.int32)
    if not PLAN.quantized:
        gl.store((v_base + new_at).to(WORD, bitcast=True) + d // 2, pair, mask=mine)


@gluon.jit
def sum_warps(quad, sums_at, weights, news, v, zero_f32, PLAN: gl.constexpr):
    """Four sums of every group over its warps: two columns of each of two heads.

    v: the new value's two columns (`new_pair`), which the first group counts.
    """
    WARPS: gl.constexpr = PLAN.warps
    GROUPS: gl.constexpr = PLAN.groups
    QUADS: gl.constexpr = 4 * PLAN.sets
    BYTES: gl.constexpr = 128 * ((PLAN.heads.shared + 1) // 2)  # of a quad
    of_groups = ()
    for n in gl.static_range(GROUPS):
        sums = (zero_f32, zero_f32, zero_f32, zero_f32)
        for w in gl.static_range(n * (WARPS // GROUPS), (n + 1) * (WARPS // GROUPS)):
            part = load_shared16(sums_at + (w * QUADS + gl.minimum(quad, QUADS - 1)) * BYTES)
            sums = (
                gl.fma(weights[w], as_float(part[0]), sums[0]),
                gl.fma(weights[WARPS + w], as_float(part[1]), sums[1]),
                gl.fma(weights[w], as_float(part[2]), sums[2]),
                gl.fma(weights[WARPS + w], as_float(part[3]), sums[3]),
            )
        if n == 0:
            low = of_pair(v, 0, PLAN)
            high = of_pair(v, 1, PLAN)
            sums = (
                gl.fma(news[0], low, sums[0]),
                gl.fma(news[1], low, sums[1]),
                gl.fma(news[0], high, sums[2]),
                gl.fma(news[1], high, sums[3]),
            )
        of_groups = of_groups + (sums,)
    return of_groups
