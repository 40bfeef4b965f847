"""A kernel of `attention_decode`: a kv head of one token over all its keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.attention.fragments import load_keys, load_values
from lowbit.runtime.kernels.attention.page_rows import page_at, page_of
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
    with_fresh,
)
from lowbit.runtime.kernels.ptx.memory import load4, shared_buffer
from lowbit.runtime.kernels.ptx.mma import high_half, low_half, threads


@gluon.jit(do_not_specialize=["table_stride"])
def attention_whole_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
    positions_ptr, angles_ptr, rows_ptr, tables_ptr, out_ptr, table_stride, eps, score_scale,
    PLAN: gl.constexpr,
):  # fmt: skip
    """PLAN: see `Plan`; its columns are a part of the values', all keys are those of `whole`."""
    if PLAN.pdl and PLAN.early:
        gdc_launch_dependents()
    BUFFER: gl.constexpr = PLAN.buffer
    position = gl.load(positions_ptr + gl.program_id(1))  # of an earlier step: before the wait
    attend_whole(
        qkv_ptr, (cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr),
        (k_ptr, v_ptr, k_scales_ptr, v_scales_ptr), position, angles_ptr, rows_ptr, tables_ptr,
        out_ptr, shared_buffer(BUFFER), table_stride, eps, score_scale, PLAN,
    )  # fmt: skip


@gluon.jit
def attend_whole(
    qkv_ptr, rope_ptrs, page_ptrs, position, angles_ptr, rows_ptr, tables_ptr, out_ptr, buffer,
    table_stride, eps, score_scale, PLAN: gl.constexpr,
):  # fmt: skip
    """A program's columns of one kv head of the token at `position`; buffer: shared memory."""
    KEYS: gl.constexpr = 8 * PLAN.keys.blocks  # of a warp at a time
    TURN: gl.constexpr = PLAN.turn
    AHEAD: gl.constexpr = PLAN.ahead
    WARPS: gl.constexpr = PLAN.warps
    RUNNING: gl.constexpr = PLAN.running
    SHARED: gl.constexpr = PLAN.heads.shared
    D: gl.constexpr = PLAN.heads.dim
    thread = threads(RUNNING)
    warp, lane, zero, zero_f32 = thread
    g = lane // 4
    t = lane % 4
    head, token = gl.program_id(0), gl.program_id(1)
    column = gl.program_id(2) * PLAN.columns
    angle = gl.load(angles_ptr + token)
    sequence = gl.load(rows_ptr + token)
    first = first_fresh(rows_ptr, token, sequence, position, PLAN)
    table = tables_ptr.to(gl.int64, bitcast=True) + sequence.to(gl.int64) * table_stride * 4
    row = warp * KEYS
    bases = bases_of(page_ptrs, head, column, PLAN)
    new_page = page_of(table, position + zero, position + 1)
    pages = ()
    next_page = new_page
    if AHEAD == 0:
        pages = (page_of(table, row, position),)
        next_page = page_of(table, row + TURN, position)
    for i in gl.static_range(AHEAD):
        pages = pages + (page_at(table, warp * KEYS + i * TURN, table_stride),)
    loaded = ()  # keys and values of all turns that are loaded ahead
    for i in gl.static_range(len(pages)):
        at = row + i * TURN
        loaded = loaded + (
            load_keys(bases, pages[i], at + g, position, g, t, at < position, PLAN),
            load_values(bases, pages[i], at + 2 * t, position, g, at < position, PLAN),
        )
    rotations = load_rotations(rope_ptrs, angle, warp, lane, zero, PLAN)
    if PLAN.pdl:
        gdc_wait()
        if not PLAN.early:
            gdc_launch_dependents()

    key = PLAN.heads.kv * SHARED * PLAN.query + kv_head(head, PLAN) * D
    qkv = qkv_ptr.to(gl.int64, bitcast=True) + token.to(gl.int64) * (2 * PLAN.width)
    value = column if PLAN.quantized else qkv + (key + PLAN.stored * D + column) * 2
    q, new_score, keys, values, fresh, buffer, new_at = score_new_key(
        qkv, key, bases, new_page, rotations, *loaded[:2],
        (row, position, TURN), value, (head, token, position, first), buffer + zero, thread, eps,
        score_scale, PLAN,
    )  # fmt: skip
    sums_at = own_sums(buffer, g, t, WARPS, PLAN)
    softmax = nothing_yet(new_score, zero_f32, PLAN)
    if AHEAD == 0:
        softmax, keys, values, row = attend_turns(
            row, next_page, keys, values, softmax, q, bases, table, (0, position, TURN), fresh,
            g, t, zero_f32, score_scale, PLAN,
        )  # fmt: skip
    softmax = attend(  # the last keys, or none at all
        softmax, q, keys, values, row, position, t, zero_f32, score_scale, AHEAD > 0, PLAN
    )
    for i in gl.static_range(1, AHEAD):
        if position > i * TURN:
            row += TURN
            keys, values = with_fresh(
                loaded[2 * i], loaded[2 * i + 1], row, position, (i + 1) * TURN, fresh, g, t, PLAN
            )
            softmax = attend(
                softmax, q, keys, values, row, position, t, zero_f32, score_scale, False, PLAN
            )
    leave_warp(softmax, buffer, sums_at, warp, g, t, PLAN)
    for after in gl.static_range(RUNNING, WARPS, RUNNING):
        softmax = _attend_as(
            warp + after, q, new_score, bases, table, position, fresh, g, t, zero_f32, score_scale,
            PLAN,
        )  # fmt: skip
        leave_warp(softmax, buffer, sums_at, warp + after, g, t, PLAN)
    _store(
        out_ptr, qkv, fresh[2], bases[1], new_at, column, new_score, buffer, sums_at, head, token,
        thread, PLAN,
    )  # fmt: skip


@gluon.jit
def _attend_as(
    warp, q, new_score, bases, table, end, fresh, g, t, zero_f32, scale, PLAN: gl.constexpr
):  # fmt: skip
    """The softmax over the keys of another warp, for which the program has none."""
    KEYS: gl.constexpr = 8 * PLAN.keys.blocks
    TURN: gl.constexpr = PLAN.turn
    row = warp * KEYS
    page = page_of(table, row, end)
    next_page = page_of(table, row + TURN, end)
    keys = load_keys(bases, page, row + g, end, g, t, row < end, PLAN)
    values = load_values(bases, page, row + 2 * t, end, g, row < end, PLAN)
    softmax = nothing_yet(new_score, zero_f32, PLAN)
    softmax, keys, values, row = attend_turns(
        row, next_page, keys, values, softmax, q, bases, table, (0, end, TURN), fresh, g, t,
        zero_f32, scale, PLAN,
    )  # fmt: skip
    return attend(softmax, q, keys, values, row, end, t, zero_f32, scale, False, PLAN)


@gluon.jit
def _store(
    out_ptr, qkv, value, v_base, new_at, column, new_score, buffer, sums_at, head, token, thread,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Append the new value, and store the program's columns of its heads."""
    WARPS: gl.constexpr = PLAN.running
    SHARED: gl.constexpr = PLAN.heads.shared
    GROUPS: gl.constexpr = PLAN.groups
    QUADS: gl.constexpr = 4 * PLAN.sets  # of sums a lane: elements d, d + 1 of heads 2 t, 2 t + 1
    EACH: gl.constexpr = (QUADS + WARPS - 1) // WARPS  # quads of a warp, side by side
    warp, lane, _, zero_f32 = thread
    g = lane // 4
    t = lane % 4
    new_values = ()
    gates = ()
    for e in gl.static_range(EACH):
        d = gl.minimum(element_of(warp * EACH + e, g, PLAN), PLAN.columns - 2)
        new_values = new_values + (new_pair(value, d, PLAN),)
        if PLAN.heads.gated:
            for h in gl.static_range(2):
                gate = (head * SHARED + gl.minimum(2 * t + h, SHARED - 1)) * PLAN.query
                gate += PLAN.heads.dim
                gates = gates + (load4(qkv + (gate + column + d).to(gl.int64) * 2),)
    tops, wholes, weights, news = weigh_warps(new_score, True, buffer, t, PLAN)
    shares, inverses = weigh_groups(tops, wholes, PLAN)
    for e in gl.static_range(EACH):
        quad = warp * EACH + e
        d = element_of(quad, g, PLAN)
        there = (quad < QUADS) & (d < PLAN.columns)
        v = new_values[e]
        append_pair(v_base, new_at, d, v, there & (t == 0), PLAN)
        of_groups = sum_warps(quad, sums_at, weights, news, v, zero_f32, PLAN)
        for h in gl.static_range(4):
            y = zero_f32
            for n in gl.static_range(GROUPS):
                if GROUPS == 1:
                    y = of_groups[n][h]
                else:
                    y += of_groups[n][h] * shares[GROUPS * (h % 2) + n]
            y *= inverses[h % 2]
            if PLAN.heads.gated:
                gate = gates[e * 2 + h % 2]
                gate = low_half(gate) if h // 2 == 0 else high_half(gate)
                y /= 1.0 + gl.exp(-gate)
            to = (token * PLAN.heads.kv + head) * SHARED + 2 * t + h % 2
            stored = there & (2 * t + h % 2 < SHARED)
            to = out_ptr + to * PLAN.heads.dim + column + d + h // 2
            gl.store(to, y.to(out_ptr.dtype.element_ty), mask=stored)


@gluon.jit
def weigh_groups(tops, wholes, PLAN: gl.constexpr):
    """Weights of the groups' sums, the second head's last, and both inverse sums of all weights.

    The groups of a program are joined as `_attention_join_kernel` joins as many splits: products
    are rounded before they are added.
    """
    GROUPS: gl.constexpr = PLAN.groups
    shares = ()
    inverses = ()
    for i in gl.static_range(2):
        highest = tops[GROUPS * i]
        for n in gl.static_range(1, GROUPS):
            highest = gl.maximum(highest, tops[GROUPS * i + n])
        whole = highest * 0.0
        for n in gl.static_range(GROUPS):
            share = gl.exp2(tops[GROUPS * i + n] - highest)
            whole += share * wholes[GROUPS * i + n]
            shares = shares + (share,)
        inverses = inverses + (1.0 / whole,)
    return shares, inverses
