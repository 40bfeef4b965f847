"""Kernel of `attention_decode`: a kv head of one token, over a split of its keys or all of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.attention.fragments import (
    PAGE_ROWS,
    add_values,
    attend,
    key_scores,
    load_keys,
    load_queries,
    load_values,
    online_softmax,
    page_at,
    page_of,
    visible,
    with_fresh_keys,
    with_fresh_values,
)
from lowbit.runtime.kernels.attention.join import (
    rows_of_split,
    running_splits,
    weigh_groups,
    weigh_warps,
)
from lowbit.runtime.kernels.attention.rotate_heads import load_angles, load_head_gains, rotated
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    load4,
    load_shared16,
    shared_buffer,
    store_floats,
    store_shared4,
)
from lowbit.runtime.kernels.ptx.mma import across, as_float, from_lane, high_half, low_half, threads


@gluon.jit
def _element(quad, g):
    """The first of the two columns of a part that a lane sums in its quad."""
    return (quad // 4 * 8 + g) * 8 + quad % 4 * 2


@gluon.jit
def _first_fresh(rows_ptr, token, row, position, TOGETHER: gl.constexpr):
    """The position of the sequence's first token in this step: its tokens stand side by side."""
    same = True
    first = position
    for i in gl.static_range(1, TOGETHER):
        same = same & (token >= i) & (gl.load(rows_ptr + gl.maximum(token - i, 0)) == row)
        first -= same.to(gl.int32)
    return first


@gluon.jit(do_not_specialize=["table_stride", "splits"])
def attention_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, positions_ptr, rows_ptr,
    tables_ptr, part_ptr, state_ptr, out_ptr, table_stride, splits, eps, score_scale,
    HEADS: gl.constexpr, SHARED: gl.constexpr, GATED: gl.constexpr, D: gl.constexpr,
    R: gl.constexpr, TOGETHER: gl.constexpr, MOST: gl.constexpr, GROUPS: gl.constexpr,
    WHOLE: gl.constexpr, SPLIT: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr,
    AHEAD: gl.constexpr, WARPS: gl.constexpr, STRIDE: gl.constexpr,
    BUFFER: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A program takes a split of the keys where SPLIT, else all keys and a part of the columns.

    splits: of a token, as they are stored; HEADS: kv heads; TOGETHER: most tokens of one sequence;
    MOST, GROUPS, WHOLE: see `KeySplit`; AHEAD: turns whose keys and values are all loaded at first,
    0 to load each turn during the one before.
    """
    KEYS: gl.constexpr = 8 * BLOCKS  # of a warp at a time
    JOINED: gl.constexpr = 1 if SPLIT else GROUPS  # groups of warps in this program
    TURN: gl.constexpr = WARPS // JOINED * KEYS
    COLUMNS: gl.constexpr = D // PARTS
    SETS: gl.constexpr = (COLUMNS + 63) // 64
    WIDE: gl.constexpr = D > 128  # queries are too many registers
    WORD: gl.constexpr = gl.pointer_type(gl.int32)
    NORM: gl.constexpr = q_norm_ptr is not None
    FP32: gl.constexpr = NORM and q_norm_ptr.dtype.element_ty == gl.float32
    QUERY: gl.constexpr = 2 * D if GATED else D  # from one query to the next
    WIDTH: gl.constexpr = HEADS * (SHARED * QUERY + 2 * D)  # from one token to the next
    ROW: gl.constexpr = HEADS * D * 2  # bytes from one key to the next
    if PDL and EARLY:
        gdc_launch_dependents()
    warp, lane, zero, none = threads(WARPS)
    g = lane // 4
    t = lane % 4
    head, token = gl.program_id(0), gl.program_id(1)
    split = gl.program_id(2) if SPLIT else gl.program_id(2) * 0
    column = gl.program_id(2) * 0 if SPLIT else gl.program_id(2) * COLUMNS
    position = gl.load(positions_ptr + token)  # of an earlier step, like pages: before the wait
    sequence = gl.load(rows_ptr + token)
    if SPLIT:
        running = running_splits(position, MOST, GROUPS, WHOLE, TURN)
        if split >= running:
            return
        start, end, stride = rows_of_split(position, split, MOST, GROUPS, WHOLE, TURN)
    else:  # up to WHOLE keys
        start, end, stride = split, position, split * 0 + JOINED * TURN
    first = _first_fresh(rows_ptr, token, sequence, position, TOGETHER)
    table = tables_ptr.to(gl.int64, bitcast=True) + sequence.to(gl.int64) * table_stride * 4
    row = start + warp * KEYS
    k_base = k_ptr.to(gl.int64, bitcast=True) + head * (2 * D)
    v_base = v_ptr.to(gl.int64, bitcast=True) + head * (2 * D) + column * 2
    new_page = page_of(table, position + zero, position + 1)
    pages = ()
    if AHEAD == 0:
        page = page_of(table, row, end)
        next_page = page_of(table, row + stride, end)
    else:
        page = page_at(table, warp * KEYS, table_stride)
        for i in gl.static_range(1, AHEAD):
            pages = pages + (page_at(table, warp * KEYS + i * (JOINED * TURN), table_stride),)
    keys = load_keys(k_base, page, row + g, end, t, row < end, D, ROW, BLOCKS)
    values = load_values(v_base, page, row + 2 * t, end, g, row < end, COLUMNS, ROW, BLOCKS)
    more = ()
    for i in gl.static_range(1, AHEAD):
        at = row + i * stride
        some_keys = load_keys(k_base, pages[i - 1], at + g, end, t, at < end, D, ROW, BLOCKS)
        more = more + (some_keys, load_values(
            v_base, pages[i - 1], at + 2 * t, end, g, at < end, COLUMNS, ROW, BLOCKS
        ))  # fmt: skip
    cos = cos_ptr.to(gl.int64, bitcast=True)
    sin = sin_ptr.to(gl.int64, bitcast=True)
    q_gain = zero.to(gl.int64)
    k_gain = q_gain
    if NORM:
        q_gain += q_norm_ptr.to(gl.int64, bitcast=True)
        k_gain += k_norm_ptr.to(gl.int64, bitcast=True)
    HELD: gl.constexpr = SHARED + TOGETHER  # queries, the new key, earlier ones of this step
    angles = ()
    gains = ()
    for i in gl.static_range(0, HELD, WARPS):
        back = gl.maximum(i + warp - SHARED, 0)
        if i == 0 or TOGETHER > 1:
            angles = angles + (load_angles(cos, sin, gl.maximum(position - back, 0), lane, D, R),)
        gain = gl.where(i + warp < SHARED, q_gain, k_gain)
        gains = gains + (load_head_gains(gain, lane, NORM, FP32, D, R),)
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()

    key = HEADS * SHARED * QUERY + head * D
    qkv = qkv_ptr.to(gl.int64, bitcast=True) + token.to(gl.int64) * (2 * WIDTH)
    value = qkv + (key + HEADS * D + column) * 2
    buffer = shared_buffer(BUFFER) + zero
    staged = buffer + SHARED * STRIDE + t * 16
    new_row = new_page.to(gl.int64) * (PAGE_ROWS * ROW)
    new_row += (position & (PAGE_ROWS - 1)).to(gl.int64) * ROW
    for i in gl.static_range(0, HELD, WARPS):
        row_of = i + warp
        x = gl.where(row_of < SHARED, (head * SHARED + row_of) * QUERY, key).to(gl.int64)
        if TOGETHER > 1:
            back = gl.minimum(gl.maximum(row_of - SHARED, 0), token)
            x -= back.to(gl.int64) * WIDTH
        words = rotated(
            qkv + x * 2, gains[i // WARPS], angles[i // WARPS if TOGETHER > 1 else 0], lane, none,
            eps, NORM, FP32, D, R,
        )  # fmt: skip
        for j in gl.static_range((D + 63) // 64):
            word = lane + 32 * j
            inside = (row_of < HELD) & (word < D // 2)
            store_shared4(buffer + row_of * STRIDE + word * 4, as_float(words[j]), inside)
            mine = inside & (row_of == SHARED) & (gl.program_id(2) == 0)
            gl.store((k_base + new_row).to(WORD, bitcast=True) + word, words[j], mask=mine)
    if TOGETHER > 1:
        fresh = start + TURN * JOINED > first
        if fresh:
            values = with_fresh_values(
                values, value, row + 2 * t, end, first, position, g, COLUMNS, 2 * WIDTH, BLOCKS
            )
    barrier()
    q_at = buffer + gl.minimum(g, SHARED) * STRIDE + t * 16
    q = q_at
    new_key = ()
    for j in gl.static_range((D + 31) // 32):
        new_key = new_key + (load_queries(staged, j, t, D),)
    if not WIDE:
        q = ()
        for j in gl.static_range((D + 31) // 32):
            q = q + (load_queries(q_at, j, t, D),)
    buffer += HELD * STRIDE
    first_score = key_scores(q, new_key, none, t, D, 1, WIDE)
    new_score = from_lane(first_score[0] * score_scale, g * 4)  # every column is the new key
    if TOGETHER > 1:
        fresh = start + TURN * JOINED > first
        if fresh:
            keys = with_fresh_keys(
                keys, staged, row + g, end, first, position, t, D, STRIDE, BLOCKS
            )

    QUADS: gl.constexpr = 4 * SETS  # of sums a lane: elements d, d + 1 of heads 2 t, 2 t + 1
    EACH: gl.constexpr = (QUADS + WARPS - 1) // WARPS  # quads of a warp, side by side
    PAIRS: gl.constexpr = (SHARED + 1) // 2  # of heads: lanes from there on hold nothing
    QUAD: gl.constexpr = 128 * PAIRS  # bytes
    sums_at = buffer + 64 * WARPS + (g * PAIRS + gl.minimum(t, PAIRS - 1)) * 16
    acc = ()
    for _ in gl.static_range(QUADS):
        acc = acc + ((none, none, none, none),)
    top = new_score
    total = none
    if AHEAD == 0:
        for at in range(start, end - stride, stride):
            scores = key_scores(q, keys, none, t, D, BLOCKS, WIDE)
            keys = load_keys(k_base, next_page, row + stride + g, end, t, None, D, ROW, BLOCKS)
            page = next_page
            next_page = page_of(table, row + 2 * stride, end)
            scores = visible(scores, row, end, t, score_scale, BLOCKS)
            top, total, fade, p = online_softmax(top, total, scores)
            acc = add_values(acc, fade, p, values, none, t, COLUMNS, BLOCKS)
            row += stride
            values = load_values(v_base, page, row + 2 * t, end, g, None, COLUMNS, ROW, BLOCKS)
            if TOGETHER > 1:
                fresh = at + stride + TURN * JOINED > first
                if fresh:
                    values = with_fresh_values(
                        values, value, row + 2 * t, end, first, position, g, COLUMNS,
                        2 * WIDTH, BLOCKS,
                    )  # fmt: skip
                    keys = with_fresh_keys(
                        keys, staged, row + g, end, first, position, t, D, STRIDE, BLOCKS
                    )
    top, total, acc = attend(  # the last keys, or none at all
        top, total, acc, q, keys, values, row, end, t, none, score_scale, D, COLUMNS, BLOCKS,
        WIDE, AHEAD > 0,
    )  # fmt: skip
    for a in gl.static_range(1, AHEAD):
        if end > a * stride:
            row += stride
            keys = more[2 * a - 2]
            values = more[2 * a - 1]
            if TOGETHER > 1:
                fresh = (a + 1) * stride > first
                if fresh:
                    values = with_fresh_values(
                        values, value, row + 2 * t, end, first, position, g, COLUMNS,
                        2 * WIDTH, BLOCKS,
                    )  # fmt: skip
                    keys = with_fresh_keys(
                        keys, staged, row + g, end, first, position, t, D, STRIDE, BLOCKS
                    )
            top, total, acc = attend(
                top, total, acc, q, keys, values, row, end, t, none, score_scale, D, COLUMNS,
                BLOCKS, WIDE, False,
            )  # fmt: skip

    new_values = ()
    gates = ()
    for e in gl.static_range(EACH):
        d = gl.minimum(_element(warp * EACH + e, g), COLUMNS - 2)
        new_values = new_values + (load4(value + d.to(gl.int64) * 2),)
        if GATED and not SPLIT:
            for h in gl.static_range(2):
                gate = (head * SHARED + gl.minimum(2 * t + h, SHARED - 1)) * QUERY + D
                gates = gates + (load4(qkv + (gate + column + d).to(gl.int64) * 2),)
    total += across(total, 1)
    total += across(total, 2)
    tops, wholes, weights, news = weigh_warps(
        top, total, acc, new_score, split == 0, buffer, sums_at, warp, g, t, QUAD, PAIRS, WARPS,
        JOINED,
    )  # fmt: skip
    if not SPLIT:
        shares, inverses = weigh_groups(tops, wholes, JOINED)
    lines = ((), ())  # of each of the two heads
    for e in gl.static_range(EACH):
        quad = warp * EACH + e
        v = new_values[e]
        d = _element(quad, g)
        there = (quad < QUADS) & (d < COLUMNS)
        owned = there & (split == 0) & (t == 0)
        gl.store((v_base + new_row).to(WORD, bitcast=True) + d // 2, v, mask=owned)
        of_groups = ()
        for n in gl.static_range(JOINED):
            sums = (none, none, none, none)
            for w in gl.static_range(n * (WARPS // JOINED), (n + 1) * (WARPS // JOINED)):
                at = sums_at + (w * QUADS + gl.minimum(quad, QUADS - 1)) * QUAD
                part = load_shared16(at)
                sums = (
                    gl.fma(weights[w], as_float(part[0]), sums[0]),
                    gl.fma(weights[WARPS + w], as_float(part[1]), sums[1]),
                    gl.fma(weights[w], as_float(part[2]), sums[2]),
                    gl.fma(weights[WARPS + w], as_float(part[3]), sums[3]),
                )
            if n == 0:
                low = low_half(v)
                high = high_half(v)
                sums = (
                    gl.fma(news[0], low, sums[0]),
                    gl.fma(news[1], low, sums[1]),
                    gl.fma(news[0], high, sums[2]),
                    gl.fma(news[1], high, sums[3]),
                )
            of_groups = of_groups + (sums,)
        for h in gl.static_range(4):
            y = none
            for n in gl.static_range(JOINED):
                if JOINED == 1:
                    y = of_groups[n][h]
                else:
                    y += of_groups[n][h] * shares[JOINED * (h % 2) + n]
            if SPLIT:
                if h % 2 == 0:
                    lines = (lines[0] + (y,), lines[1])
                else:
                    lines = (lines[0], lines[1] + (y,))
            else:
                y *= inverses[h % 2]
                if GATED:
                    gate = gates[e * 2 + h % 2]
                    gate = low_half(gate) if h // 2 == 0 else high_half(gate)
                    y /= 1.0 + gl.exp(-gate)
                to = (token * HEADS + head) * SHARED + 2 * t + h % 2
                stored = there & (2 * t + h % 2 < SHARED)
                to = out_ptr + to * D + column + d + h // 2
                gl.store(to, y.to(out_ptr.dtype.element_ty), mask=stored)
    if SPLIT:
        d = _element(warp * EACH, g)
        for h in gl.static_range(2):
            to = ((token * HEADS + head) * SHARED + 2 * t + h) * splits + split
            stored = 2 * t + h < SHARED
            store_floats(part_ptr + to * D + d, lines[h], stored & (d < D) & (warp < QUADS))
            once = stored & (warp == 0) & (g == 0)
            store_floats(state_ptr + to * 2, (tops[h], wholes[h]), once)
