"""A kernel of `attention_decode`: a kv head of one token over all its splits, a warp each in turn.

For steps of many tokens, which are programs enough. A split has one turn of keys here, whose blocks
are those of as many warps elsewhere; its warp takes them one after another and joins them as
`weigh_warps` and `sum_warps` do. The splits wait in shared memory and are joined as
`_attention_join_kernel` joins them. Blocks come into registers while the one before is multiplied,
or through a ring in shared memory (`ring`), which leaves registers to the products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.attention.codes import value_products
from lowbit.runtime.kernels.attention.fragments import (
    add_column,
    key_scores,
    load_keys,
    load_values,
    online_softmax,
    visible,
    weight_words,
)
from lowbit.runtime.kernels.attention.page_rows import page_of
from lowbit.runtime.kernels.attention.program import (
    append_pair,
    bases_of,
    element_of,
    kv_head,
    load_rotations,
    new_pair,
    nothing_yet,
    of_pair,
    own_sums,
    score_new_key,
)
from lowbit.runtime.kernels.attention.ring import (
    begin_block,
    begin_following,
    split_pages,
    take_keys,
    take_values,
)
from lowbit.runtime.kernels.attention.whole import attend_whole
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    commit_copies,
    floats,
    load4,
    load_shared16,
    shared_memory,
    store_shared4,
    store_shared16,
    wait_copies,
    warp_barrier,
)
from lowbit.runtime.kernels.ptx.mma import (
    across,
    as_float,
    as_word,
    from_lane,
    high_half,
    low_half,
    threads,
)


@gluon.jit(do_not_specialize=["table_stride"])
def attention_whole_splits_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
    positions_ptr, angles_ptr, rows_ptr, tables_ptr, out_ptr, table_stride, eps, score_scale,
    PLAN: gl.constexpr,
):  # fmt: skip
    """PLAN: see `Plan`; its columns are a part of the values'.

    No other token of the sequence is in the step.
    """
    BYTES: gl.constexpr = PLAN.shared
    buffer = shared_memory(BYTES, PLAN.running, table_stride < 0)  # once for both
    position = gl.load(positions_ptr + gl.program_id(1))  # of an earlier step: before the wait
    rope_ptrs = (cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr)
    page_ptrs = (k_ptr, v_ptr, k_scales_ptr, v_scales_ptr)
    if position <= PLAN.keys.whole:
        attend_whole(
            qkv_ptr, rope_ptrs, page_ptrs, position, angles_ptr, rows_ptr, tables_ptr, out_ptr,
            buffer, table_stride, eps, score_scale, PLAN,
        )  # fmt: skip
    else:
        _attend_splits(
            qkv_ptr, rope_ptrs, page_ptrs, position, angles_ptr, rows_ptr, tables_ptr, out_ptr,
            buffer, table_stride, eps, score_scale, PLAN,
        )  # fmt: skip


@gluon.jit
def _attend_splits(
    qkv_ptr, rope_ptrs, page_ptrs, position, angles_ptr, rows_ptr, tables_ptr, out_ptr, buffer,
    table_stride, eps, score_scale, PLAN: gl.constexpr,
):  # fmt: skip
    """More keys than `whole`, and at most a turn for each split."""
    WARPS: gl.constexpr = PLAN.running
    SPLITS: gl.constexpr = PLAN.splits
    SHARED: gl.constexpr = PLAN.heads.shared
    D: gl.constexpr = PLAN.heads.dim
    TURN: gl.constexpr = PLAN.keys.turn
    AHEAD: gl.constexpr = PLAN.ring - 1  # blocks on their way
    thread = threads(WARPS)
    warp, lane, zero, zero_f32 = thread
    g = lane // 4
    t = lane % 4
    head, token = gl.program_id(0), gl.program_id(1)
    column = gl.program_id(2) * PLAN.columns
    angle = gl.load(angles_ptr + token)
    sequence = gl.load(rows_ptr + token)
    table = tables_ptr.to(gl.int64, bitcast=True) + sequence.to(gl.int64) * table_stride * 4
    bases = bases_of(page_ptrs, head, column, PLAN)
    new_page = page_of(table, position + zero, position + 1)
    loaded = ()
    pages = ()
    ring = buffer + zero + PLAN.ring_at + warp * PLAN.ring_bytes
    if PLAN.ring > 0:
        pages = split_pages(table, warp, position, PLAN)
        for i in gl.static_range(AHEAD):
            begin_block(bases, pages, warp, position, i, i, ring, lane, PLAN)
            commit_copies()
    else:
        loaded = _load_block(bases, table, warp * TURN, position, 0, g, t, PLAN)
    rotations = load_rotations(rope_ptrs, angle, warp, lane, zero, PLAN)
    if PLAN.pdl:
        gdc_wait()
        gdc_launch_dependents()

    key = PLAN.heads.kv * SHARED * PLAN.query + kv_head(head, PLAN) * D
    qkv = qkv_ptr.to(gl.int64, bitcast=True) + token.to(gl.int64) * (2 * PLAN.width)
    value = column if PLAN.quantized else qkv + (key + PLAN.stored * D + column) * 2
    q, new_score, _, _, fresh, buffer, new_at = score_new_key(
        qkv, key, bases, new_page, rotations, (), (), (0, position, 0), value,
        (head, token, position, position), buffer + zero, thread, eps, score_scale, PLAN,
    )  # fmt: skip
    sums_at = own_sums(buffer, g, t, SPLITS, PLAN)
    for first in gl.static_range(0, SPLITS, WARPS):
        split = first + warp
        acc, top, total = nothing_yet(new_score, zero_f32, PLAN)
        next_pages = ()
        if PLAN.ring > 0 and first + WARPS < SPLITS:
            next_pages = split_pages(table, split + WARPS, position, PLAN)
        if position > first * TURN:
            if PLAN.ring > 0:
                acc, top, total = _attend_from_ring(
                    first // WARPS, (pages, next_pages), ring, q, bases, split, position, new_score,
                    kv_head(head, PLAN), lane, zero_f32, score_scale, PLAN,
                )  # fmt: skip
            else:
                if first > 0:
                    loaded = _load_block(bases, table, split * TURN, position, 0, g, t, PLAN)
                acc, top, total = _attend_split(
                    loaded, q, bases, table, split, position, new_score, g, t, zero_f32,
                    score_scale, PLAN,
                )  # fmt: skip
        pages = next_pages
        _leave_split(acc, top, total, buffer, sums_at, split, g, t, PLAN)
    barrier()
    _store(
        out_ptr, qkv, fresh[2], bases[1], new_at, column, new_score, buffer, sums_at, head, token,
        thread, PLAN,
    )  # fmt: skip


@gluon.jit
def _load_block(bases, table, row, end, i: gl.constexpr, g, t, PLAN: gl.constexpr):
    """Keys of the i-th block of a split, those of all blocks first, and then the values of each.

    row: the split's first.
    """
    BLOCKS: gl.constexpr = PLAN.keys.warps
    KEYS: gl.constexpr = 8 * PLAN.keys.blocks
    row += i % BLOCKS * KEYS
    page = page_of(table, row, end)
    if i < BLOCKS:
        loaded = load_keys(bases, page, row + g, end, g, t, row < end, PLAN)
    else:
        loaded = load_values(bases, page, row + 2 * t, end, g, row < end, PLAN)
    return loaded


@gluon.jit
def _attend_split(
    loaded, q, bases, table, split, end, new_score, g, t, zero_f32, scale, PLAN: gl.constexpr
):  # fmt: skip
    """A split's sums, highest score and sum of weights, without the new value.

    loaded: keys of the first block; the next is loaded while one is multiplied.
    """
    BLOCKS: gl.constexpr = PLAN.keys.warps
    row = split * PLAN.keys.turn
    found = _nothing_scored(new_score)
    for i in gl.static_range(BLOCKS):
        keys = loaded
        loaded = _load_block(bases, table, row, end, i + 1, g, t, PLAN)
        found = _score_block(found, q, keys, row, end, i, new_score, t, zero_f32, scale, PLAN)
    whole = _new_weight(found, split, new_score)
    sums, _, _ = nothing_yet(new_score, zero_f32, PLAN)
    for i in gl.static_range(BLOCKS):
        values = loaded
        if i + 1 < BLOCKS:
            loaded = _load_block(bases, table, row, end, BLOCKS + i + 1, g, t, PLAN)
        sums, whole = _add_block(sums, whole, found, values, i, t, zero_f32, PLAN)
    return sums, found[3], whole


@gluon.jit
def _attend_from_ring(
    ROUND: gl.constexpr, pages, ring, q, bases, split, end, new_score, head, lane, zero_f32, scale,
    PLAN: gl.constexpr,
):  # fmt: skip
    """`_attend_split` with blocks from the warp's ring, in which the first ones are on their way.

    pages: of this split and of the warp's next one, none behind its last; head: of keys, in pages.
    """
    BLOCKS: gl.constexpr = PLAN.keys.warps
    FIRST: gl.constexpr = ROUND * 2 * BLOCKS  # entry of the ring
    KEYS: gl.constexpr = 8 * PLAN.keys.blocks
    SCALES: gl.constexpr = 8 * KEYS  # bytes of a block's
    OPEN: gl.constexpr = PLAN.ring - 2  # batches that need not be there
    g = lane // 4
    t = lane % 4
    row = split * PLAN.keys.turn
    found = _nothing_scored(new_score)
    for i in gl.static_range(BLOCKS):
        wait_copies(OPEN)
        warp_barrier()
        begin_following(bases, pages, split, end, i, FIRST, ring, lane, PLAN)
        entry = ring + (FIRST + i) % PLAN.ring * PLAN.entry
        scales_at = ring + PLAN.scales_in_ring + i * SCALES
        keys = take_keys(entry, scales_at, row + i * KEYS, end, head, lane, PLAN)
        found = _score_block(found, q, keys, row, end, i, new_score, t, zero_f32, scale, PLAN)
    whole = _new_weight(found, split, new_score)
    sums, _, _ = nothing_yet(new_score, zero_f32, PLAN)
    for i in gl.static_range(BLOCKS):
        wait_copies(OPEN)
        warp_barrier()
        begin_following(bases, pages, split, end, BLOCKS + i, FIRST, ring, lane, PLAN)
        entry = ring + (FIRST + BLOCKS + i) % PLAN.ring * PLAN.entry
        values = take_values(entry, g, t, PLAN)
        sums, whole = _add_block(sums, whole, found, values, i, t, zero_f32, PLAN)
    return sums, found[3], whole


@gluon.jit
def _nothing_scored(new_score):
    """Weights, highest scores and sums of weights of no blocks, and the highest score of all."""
    return (), (), (), new_score


@gluon.jit
def _score_block(
    found, q, keys, row, end, i: gl.constexpr, new_score, t, zero_f32, scale, PLAN: gl.constexpr
):  # fmt: skip
    """Add the i-th block of a split: weights of its keys, relative to its own highest score."""
    weights, tops, totals, highest = found
    scores, shares = key_scores(q, keys, zero_f32, t, PLAN)
    scores = visible(scores, row + i * (8 * PLAN.keys.blocks), end, t, scale)
    top, total, _, p, most = online_softmax(new_score, zero_f32, scores)
    total += across(total, 1)
    total += across(total, 2)
    weights = weights + (weight_words(p, most, shares, zero_f32, PLAN),)
    return weights, tops + (top,), totals + (total,), gl.maximum(highest, top)


@gluon.jit
def _new_weight(found, split, new_score):
    """The weight of the new token in its split, relative to the highest score of all blocks."""
    return gl.where(split == 0, gl.exp2(new_score - found[3]), 0.0)


@gluon.jit
def _add_block(sums, whole, found, values, i: gl.constexpr, t, zero_f32, PLAN: gl.constexpr):
    """Add the values of the i-th block by its weights, and these."""
    weights, tops, totals, highest = found
    weight = gl.exp2(tops[i] - highest)
    whole = gl.fma(weight, totals[i], whole)
    if PLAN.quantized:
        weight *= weights[i][1]  # a power of two
    even = from_lane(weight, t * 8)
    odd = from_lane(weight, t * 8 + 4)
    new = ()
    for quad in gl.static_range(len(sums)):
        s = sums[quad]
        if PLAN.quantized:
            a = value_products(values, quad, weights[i][0], zero_f32, PLAN)
        else:
            no_sums = (zero_f32, zero_f32, zero_f32, zero_f32)
            a = add_column(no_sums, values, quad, weights[i][0], zero_f32, PLAN)
        pair = gl.fma(even, a[0], s[0]), gl.fma(odd, a[1], s[1])
        new = new + (pair + (gl.fma(even, a[2], s[2]), gl.fma(odd, a[3], s[3])),)
    return new, whole


@gluon.jit
def _leave_split(acc, top, total, buffer, sums_at, split, g, t, PLAN: gl.constexpr):
    """Leave what `_attend_split` gives in shared memory, at the split's place."""
    SPLITS: gl.constexpr = PLAN.splits
    PAIRS: gl.constexpr = (PLAN.heads.shared + 1) // 2
    there = split < SPLITS
    mine = (g * SPLITS + split) * 4
    store_shared4(buffer + mine, top, there & (t == 0))
    store_shared4(buffer + 32 * SPLITS + mine, total, there & (t == 0))
    for quad in gl.static_range(len(acc)):
        c = acc[quad]
        words = (as_word(c[0]), as_word(c[1]), as_word(c[2]), as_word(c[3]))
        to = sums_at + (split * len(acc) + quad) * (128 * PAIRS)
        store_shared16(to, words, there & (t < PAIRS))


@gluon.jit
def _store(
    out_ptr, qkv, value, v_base, new_at, column, new_score, buffer, sums_at, head, token, thread,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Append the new value, join the splits and store the program's columns of its heads."""
    WARPS: gl.constexpr = PLAN.running
    SPLITS: gl.constexpr = PLAN.splits
    SHARED: gl.constexpr = PLAN.heads.shared
    D: gl.constexpr = PLAN.heads.dim
    QUADS: gl.constexpr = 4 * PLAN.sets
    EACH: gl.constexpr = (QUADS + WARPS - 1) // WARPS
    BYTES: gl.constexpr = 128 * ((SHARED + 1) // 2)  # of a quad
    warp, lane, _, zero_f32 = thread
    g = lane // 4
    t = lane % 4
    shares = ()
    inverses = ()
    news = ()
    for i in gl.static_range(2):
        of_head = (2 * t + i) * (4 * SPLITS)
        tops = floats(buffer + of_head, SPLITS)
        totals = floats(buffer + 32 * SPLITS + of_head, SPLITS)
        new_of = from_lane(new_score, t * 8 + 4 * i)
        news = news + (gl.exp2(new_of - tops[0]),)
        highest = tops[0]
        for s in gl.static_range(1, SPLITS):
            highest = gl.maximum(highest, tops[s])
        parts = ()
        for s in gl.static_range(SPLITS):
            share = gl.exp2(tops[s] - highest)
            shares = shares + (share,)
            parts = parts + (share * totals[s],)
        inverses = inverses + (1.0 / joined(parts, PLAN.keys.most),)
    for e in gl.static_range(EACH):
        quad = warp * EACH + e
        d = element_of(quad, g, PLAN)
        there = (quad < QUADS) & (d < PLAN.columns)
        inside = gl.minimum(d, PLAN.columns - 2)
        v = new_pair(value, inside, PLAN)
        append_pair(v_base, new_at, d, v, there & (t == 0), PLAN)
        at = sums_at + gl.minimum(quad, QUADS - 1) * BYTES
        of_splits = ()
        for s in gl.static_range(SPLITS):
            part = load_shared16(at + s * (QUADS * BYTES))
            of_splits = of_splits + (part,)
        for h in gl.static_range(4):
            parts = ()
            for s in gl.static_range(SPLITS):
                one = as_float(of_splits[s][h])
                new = of_pair(v, h // 2, PLAN)
                one = gl.fma(news[h % 2] if s == 0 else zero_f32, new, one)
                parts = parts + (shares[SPLITS * (h % 2) + s] * one,)
            y = joined(parts, PLAN.keys.most) * inverses[h % 2]
            if PLAN.heads.gated:
                gate = (head * SHARED + gl.minimum(2 * t + h % 2, SHARED - 1)) * PLAN.query + D
                gate = load4(qkv + (gate + column + inside).to(gl.int64) * 2)
                gate = low_half(gate) if h // 2 == 0 else high_half(gate)
                y /= 1.0 + gl.exp(-gate)
            to = (token * PLAN.heads.kv + head) * SHARED + 2 * t + h % 2
            to = out_ptr + to * D + column + d + h // 2
            stored = there & (2 * t + h % 2 < SHARED)
            gl.store(to, y.to(out_ptr.dtype.element_ty), mask=stored)


@gluon.jit
def joined(parts, MOST: gl.constexpr):
    """The sum of the first parts of MOST, as `_attention_join_kernel` adds them.

    Eight lanes have every eighth part each; then lanes that are four, two and one apart are added.
    """
    LANES: gl.constexpr = min(8, MOST)
    sums = ()
    for first in gl.static_range(min(LANES, len(parts))):
        total = parts[first]
        for s in gl.static_range(first + LANES, len(parts), LANES):
            total += parts[s]
        sums = sums + (total,)
    for _level in gl.static_range(3):
        if len(sums) > 1:
            fewer = ()
            for i in gl.static_range(len(sums) // 2):
                fewer = fewer + (sums[i] + sums[i + len(sums) // 2],)
            sums = fewer
    return sums[0]  # type: ignore[misc]
