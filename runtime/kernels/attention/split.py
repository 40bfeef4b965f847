"""A kernel of `attention_decode`: a kv head of one token over a split of its keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.attention.fragments import (
    add_values,
    key_scores,
    load_keys,
    load_values,
    online_softmax,
    visible,
    with_fresh_keys,
    with_fresh_values,
)
from lowbit.runtime.kernels.attention.join import rows_of_split, running_splits
from lowbit.runtime.kernels.attention.page_rows import page_of
from lowbit.runtime.kernels.attention.program import (
    append_pair,
    attend,
    attend_turns,
    bases_of,
    element_of,
    first_fresh,
    kv_head,
    leave_warp,
    load_rotations,
    new_pair,
    nothing_yet,
    own_sums,
    score_new_key,
    sum_warps,
    weigh_warps,
)
from lowbit.runtime.kernels.attention.ring import (
    begin_rows,
    begin_scales,
    take_keys,
    take_values,
)
from lowbit.runtime.kernels.ptx.memory import (
    commit_copies,
    shared_memory,
    store_floats,
    wait_copies,
    warp_barrier,
)
from lowbit.runtime.kernels.ptx.mma import threads


@gluon.jit(do_not_specialize=["table_stride"])
def attention_split_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
    positions_ptr, angles_ptr, rows_ptr, tables_ptr, part_ptr, state_ptr, table_stride, eps,
    score_scale, PLAN: gl.constexpr,
):  # fmt: skip
    """PLAN: see `Plan`; all columns of the values. As many splits are stored as are launched."""
    RULE: gl.constexpr = PLAN.keys
    KEYS: gl.constexpr = 8 * PLAN.keys.blocks  # of a warp at a time
    TURN: gl.constexpr = PLAN.turn
    BYTES: gl.constexpr = PLAN.shared
    WARPS: gl.constexpr = PLAN.warps
    SHARED: gl.constexpr = PLAN.heads.shared
    D: gl.constexpr = PLAN.heads.dim
    thread = threads(WARPS)
    warp, lane, zero, zero_f32 = thread
    g = lane // 4
    t = lane % 4
    head, token, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    position = gl.load(positions_ptr + token)  # of an earlier step, like pages: before the wait
    angle = gl.load(angles_ptr + token)
    sequence = gl.load(rows_ptr + token)
    running = running_splits(position, TURN, RULE)
    if split >= running:
        return
    start, end, stride = rows_of_split(position, split, TURN, RULE)
    first = first_fresh(rows_ptr, token, sequence, position, PLAN)
    table = tables_ptr.to(gl.int64, bitcast=True) + sequence.to(gl.int64) * table_stride * 4
    row = start + warp * KEYS
    bases = bases_of((k_ptr, v_ptr, k_scales_ptr, v_scales_ptr), head, 0, PLAN)
    new_page = page_of(table, position + zero, position + 1)
    page = page_of(table, row, end)
    next_page = page_of(table, row + stride, end)
    buffer = shared_memory(BYTES, WARPS, table_stride < 0) + zero
    ring = buffer + PLAN.ring_at + warp * PLAN.ring_bytes
    keys = ()
    values = ()
    if PLAN.ring > 0:
        _begin_keys(bases, page, row, end, ring, ring + PLAN.scales_in_ring, lane, PLAN)
        begin_rows(bases[1], page, row, end, ring + PLAN.entry, lane, PLAN)
        commit_copies()
    else:
        keys = load_keys(bases, page, row + g, end, g, t, row < end, PLAN)
        values = load_values(bases, page, row + 2 * t, end, g, row < end, PLAN)
    rope_ptrs = (cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr)
    rotations = load_rotations(rope_ptrs, angle, warp, lane, zero, PLAN)
    if PLAN.pdl:
        gdc_wait()
        gdc_launch_dependents()

    key = PLAN.heads.kv * SHARED * PLAN.query + kv_head(head, PLAN) * D
    qkv = qkv_ptr.to(gl.int64, bitcast=True) + token.to(gl.int64) * (2 * PLAN.width)
    value = 0 if PLAN.quantized else qkv + (key + PLAN.stored * D) * 2
    q, new_score, keys, values, fresh, buffer, new_at = score_new_key(
        qkv, key, bases, new_page, rotations, keys, values, (row, end, start + TURN),
        value, (head, token, position, first), buffer, thread, eps, score_scale, PLAN,
    )  # fmt: skip
    sums_at = own_sums(buffer, g, t, WARPS, PLAN)
    softmax = nothing_yet(new_score, zero_f32, PLAN)
    if PLAN.ring > 0:
        softmax = _attend_from_ring(
            softmax, row, next_page, q, bases, table, (start, end, stride), fresh, ring,
            kv_head(head, PLAN), thread, score_scale, PLAN,
        )  # fmt: skip
    else:
        softmax, keys, values, row = attend_turns(
            row, next_page, keys, values, softmax, q, bases, table, (start, end, stride), fresh, g,
            t, zero_f32, score_scale, PLAN,
        )  # fmt: skip
        softmax = attend(  # the last keys, or none at all
            softmax, q, keys, values, row, end, t, zero_f32, score_scale, False, PLAN
        )
    _store(
        part_ptr, state_ptr, fresh[2], bases[1], new_at, softmax, new_score, buffer, sums_at, head,
        token, split, thread, PLAN,
    )  # fmt: skip


@gluon.jit
def _begin_keys(bases, page, row, end, entry, scales_at, lane, PLAN: gl.constexpr):
    """Begin to copy a block of keys, with all its scales, one batch."""
    begin_rows(bases[0], page, row, end, entry, lane, PLAN)
    if PLAN.quantized:
        begin_scales(bases, page, row, scales_at, lane, PLAN)
    commit_copies()


@gluon.jit
def _attend_from_ring(
    softmax, row, next_page, q, bases, table, span, fresh, ring, head, thread, scale,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Attend to all turns of the warp, whose blocks come through a ring of three entries.

    Keys and values of the first turn are on their way to the first two. The rest is as for
    `attend_turns`; head: of keys, in pages.
    """
    SCALES: gl.constexpr = 64 * PLAN.keys.blocks  # bytes of a block's
    _, lane, zero, zero_f32 = thread
    acc, top, total = softmax
    start, end, stride = span
    first, position, value, heads = fresh
    g = lane // 4
    t = lane % 4
    place = zero  # of the turn's keys in the ring; its values stand behind them
    scales_at = ring + PLAN.scales_in_ring
    other_scales = scales_at + SCALES
    for at in range(start, end, stride):
        before = gl.where(place == 0, 2, place - 1)
        behind = gl.where(place == 2, 0, place + 1)
        wait_copies(1)
        warp_barrier()
        following = row + stride
        to = ring + before * PLAN.entry
        _begin_keys(bases, next_page, following, end, to, other_scales, lane, PLAN)
        entry = ring + place * PLAN.entry
        keys = take_keys(entry, scales_at, row, end, head, lane, PLAN)
        if PLAN.tokens_per_sequence > 1:
            any_fresh = at + PLAN.turn > first
            if any_fresh:
                keys = with_fresh_keys(keys, heads, row + g, end, first, position, g, t, PLAN)
        scores, shares = key_scores(q, keys, zero_f32, t, PLAN)
        scores = visible(scores, row, end, t, scale)
        top, total, fade, p, highest = online_softmax(top, total, scores)
        wait_copies(1)
        warp_barrier()
        begin_rows(bases[1], next_page, following, end, entry, lane, PLAN)
        commit_copies()
        values = take_values(ring + behind * PLAN.entry, g, t, PLAN)
        if PLAN.tokens_per_sequence > 1:
            any_fresh = at + PLAN.turn > first
            if any_fresh:
                values = with_fresh_values(
                    values, value, row + 2 * t, end, first, position, g, PLAN
                )  # fmt: skip
        acc = add_values(acc, fade, p, highest, shares, values, zero_f32, t, PLAN)
        next_page = page_of(table, following + stride, end)
        row = following
        place = before
        swapped = scales_at
        scales_at = other_scales
        other_scales = swapped
    return acc, top, total


@gluon.jit
def _store(
    part_ptr, state_ptr, value, v_base, new_at, softmax, new_score, buffer, sums_at, head, token,
    split, thread, PLAN: gl.constexpr,
):  # fmt: skip
    """Store a split's sums, highest score and sum of weights; the first appends the new value."""
    WARPS: gl.constexpr = PLAN.warps
    SHARED: gl.constexpr = PLAN.heads.shared
    D: gl.constexpr = PLAN.heads.dim
    QUADS: gl.constexpr = 4 * PLAN.sets  # of sums a lane: elements d, d + 1 of heads 2 t, 2 t + 1
    EACH: gl.constexpr = (QUADS + WARPS - 1) // WARPS  # quads of a warp, side by side
    warp, lane, _, zero_f32 = thread
    g = lane // 4
    t = lane % 4
    new_values = ()
    for e in gl.static_range(EACH):
        d = gl.minimum(element_of(warp * EACH + e, g, PLAN), D - 2)
        new_values = new_values + (new_pair(value, d, PLAN),)
    leave_warp(softmax, buffer, sums_at, warp, g, t, PLAN)
    tops, wholes, weights, news = weigh_warps(new_score, split == 0, buffer, t, PLAN)
    lines = ((), ())  # of each of the two heads
    for e in gl.static_range(EACH):
        quad = warp * EACH + e
        d = element_of(quad, g, PLAN)
        owned = (quad < QUADS) & (d < D) & (split == 0) & (t == 0)
        append_pair(v_base, new_at, d, new_values[e], owned, PLAN)
        (sums,) = sum_warps(quad, sums_at, weights, news, new_values[e], zero_f32, PLAN)
        lines = (lines[0] + (sums[0], sums[2]), lines[1] + (sums[1], sums[3]))
    d = element_of(warp * EACH, g, PLAN)
    for h in gl.static_range(2):
        to = ((token * PLAN.heads.kv + head) * SHARED + 2 * t + h) * gl.num_programs(2) + split
        stored = 2 * t + h < SHARED
        store_floats(part_ptr + to * D + d, lines[h], stored & (d < D) & (warp < QUADS))
        once = stored & (warp == 0) & (g == 0)
        store_floats(state_ptr + to * 2, (tops[h], wholes[h]), once)
