"""Kernel of `delta_decode`: the delta rule for a value head of a sequence, or some of its columns.

`places` are addresses in shared memory: q and k of the turn's tokens, their v and gain * silu(z),
their S^T q and S^T k, their factors (beta, exp(g), 1 / |k|, scale / |q|, and q . k behind them),
their sums of squares, the count of programs that have read the window, and each warp's products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.delta.heads import (
    convolved,
    gates,
    load_before,
    load_rows,
    load_taps,
    load_window,
    norms,
    over_lanes,
    part,
    products,
    row_values,
    silu,
    store_products,
    store_totals,
    store_window,
    updated_rows,
)
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    count_round,
    floats,
    load_shared4,
    shared_buffer,
    store16,
    store_shared4,
    store_shared16,
)
from lowbit.runtime.kernels.ptx.mma import as_float, as_word, threads


@gluon.jit
def recurrence_kernel(
    qkvz_ptr, ba_ptr, window_ptr, memory_ptr, arrived_ptr, starts_ptr, read_ptr, write_ptr,
    taps_ptr, decay_ptr, dt_bias_ptr, gain_ptr, out_ptr, squares_ptr, eps, PLAN: gl.constexpr,
):  # fmt: skip
    """See `delta_decode`; PLAN is a `DeltaPlan`."""
    SIZES: gl.constexpr = PLAN.sizes
    Hk: gl.constexpr = PLAN.sizes.Hk
    Hv: gl.constexpr = PLAN.sizes.Hv
    Dk: gl.constexpr = PLAN.sizes.Dk
    Dv: gl.constexpr = PLAN.sizes.Dv
    W: gl.constexpr = PLAN.sizes.W
    SHARED: gl.constexpr = PLAN.sizes.shared
    COLUMNS: gl.constexpr = PLAN.columns
    LANES: gl.constexpr = PLAN.lanes
    HALF: gl.constexpr = PLAN.half
    ROWS: gl.constexpr = PLAN.rows
    TURN: gl.constexpr = PLAN.turn
    SLOT: gl.constexpr = PLAN.sizes.Hv * PLAN.sizes.Dk * PLAN.sizes.Dv * 4  # bytes
    BUFFER: gl.constexpr = PLAN.buffer
    warp, lane, zero, zero_f32 = threads(PLAN.warps)
    thread = warp * 32 + lane
    head = gl.program_id(0) // PLAN.splits
    split = gl.program_id(0) % PLAN.splits
    sequence = gl.program_id(1)
    first = gl.load(starts_ptr + sequence)
    end = gl.load(starts_ptr + sequence + 1)
    slot = gl.maximum(gl.load(read_ptr + sequence), 0)

    own = lane % LANES * 4  # column of those that the program has
    first_row = (warp * (32 // LANES) + lane // LANES) * ROWS
    in_slot = head * (Dk * Dv) + gl.minimum(first_row, Dk - ROWS) * Dv + split * COLUMNS + own
    memory = memory_ptr.to(gl.int64, bitcast=True) + in_slot.to(gl.int64) * 4
    S = load_rows(memory + slot.to(gl.int64) * SLOT, PLAN)
    of_head = thread % HALF
    is_key = of_head < Dk
    qk = gl.where(thread >= HALF, Hk * Dk, 0) + head // SHARED * Dk + of_head  # channel
    turn = thread // (2 * COLUMNS)  # the token of a turn whose v or z this thread has
    is_z = thread % (2 * COLUMNS) >= COLUMNS
    value = head * Dv + split * COLUMNS + thread % COLUMNS
    vz = value + gl.where(is_z, SIZES.C, 2 * Hk * Dk)  # channel
    is_value = (turn < TURN) & (turn < end - first)
    is_v = is_value & (thread % (2 * COLUMNS) < COLUMNS)
    qk_window = load_window(window_ptr, slot, qk, is_key, SIZES)
    v_window = load_window(window_ptr, slot, vz, is_v, SIZES)
    qk_taps = load_taps(taps_ptr, qk, is_key, W)
    v_taps = load_taps(taps_ptr, vz, is_v, W)
    gain = gl.load(gain_ptr + split * COLUMNS + thread % COLUMNS, mask=is_value & is_z, other=1.0)
    decay = gl.load(decay_ptr + head)
    dt_bias = gl.load(dt_bias_ptr + head)
    arrived = arrived_ptr.to(gl.int64, bitcast=True) + (slot * Hk + head // SHARED).to(gl.int64) * 4
    places = places_of(shared_buffer(BUFFER) + zero, PLAN)
    if PLAN.pdl:
        gdc_wait()
        gdc_launch_dependents()

    for base in range(first, end, TURN):
        count = gl.minimum(end - base, TURN)
        x_at = qkvz_ptr + (base * SIZES.width + qk)
        x = gl.load(x_at, mask=is_key, other=0.0)
        target = gl.load(write_ptr + base)
        own_there = is_value & (turn < count)
        vz_input = gl.load(qkvz_ptr + ((base + turn) * SIZES.width + vz), mask=own_there, other=0.0)
        v_target = gl.load(write_ptr + (base + turn), mask=is_v & own_there, other=-1)
        gated = gl.minimum(warp % TURN, count - 1)  # the token whose gates this warp has
        gates_at = ba_ptr + ((base + gated) * (2 * Hv) + head)
        b = gl.load(gates_at)
        a = gl.load(gates_at + Hv)
        v_before = v_window
        later = ((x,) * (TURN - 1), (gl.minimum(target, -1),) * (TURN - 1))
        if end - first > 1:
            later = later_tokens(x_at, write_ptr + base, count, is_key, PLAN)
            v_before = load_before(
                v_window, qkvz_ptr, base - first + turn, base + turn, vz, is_v & own_there, SIZES
            )
        inputs = qk_window + (x,) + later[0]
        targets = (target,) + later[1]
        for t in gl.static_range(TURN):
            if t < count:
                y = convolved(part(inputs, t, W - 1), inputs[W - 1 + t], qk_taps, W)
                store_shared4(places[0] + (t * PLAN.key_bytes + thread * 4), silu(y), is_key)
        y = gl.where(is_z, vz_input.to(gl.float32), convolved(v_before, vz_input, v_taps, W))
        store_shared4(places[1] + thread * 4, gain * silu(y), own_there)
        barrier()
        before = count_reader(arrived + zero, slot, targets, zero, thread, PLAN)
        moved = part(v_before, 1, W - 2) + (vz_input,)
        store_window(window_ptr, v_target, moved, vz, v_target >= 0, SIZES)
        store_factors(places, gated, b, a, decay, dt_bias, (warp, lane, zero_f32), PLAN)
        for t in range(0, count):
            target = gl.load(write_ptr + base + t)
            S = after_token(S, t, places, before, first_row, own, (warp, lane, zero_f32), PLAN)
            if target >= 0:
                for i in gl.static_range(ROWS):
                    row_at = memory + target.to(gl.int64) * SLOT + i * (Dv * 4)
                    store16(row_at, S[i], first_row < Dk)
        store_results(
            out_ptr, squares_ptr, places, base, count, head, split, thread, eps, PLAN
        )  # fmt: skip
        for t in gl.static_range(TURN):
            if targets[t] >= 0:
                moves = is_key & moves_window(places, slot, targets[t], PLAN)
                store_window(window_ptr, targets[t], part(inputs, t + 1, W - 1), qk, moves, SIZES)
        qk_window = part(inputs, TURN, W - 1)
        if base + TURN < end:
            barrier()


@gluon.jit
def places_of(keys_at, PLAN: gl.constexpr):
    """Addresses in shared memory, which begins with q and k."""
    TURN: gl.constexpr = PLAN.turn
    values_at = keys_at + TURN * PLAN.key_bytes
    totals_at = values_at + TURN * PLAN.value_bytes
    factors_at = totals_at + TURN * PLAN.value_bytes
    squares_at = factors_at + TURN * 32
    before_at = squares_at + TURN * 16
    return keys_at, values_at, totals_at, factors_at, squares_at, before_at, before_at + 16


@gluon.jit
def later_tokens(x_at, write_at, count, is_key, PLAN: gl.constexpr):
    """Inputs of q or k of a turn's tokens but the first, and the slots that take their states."""
    TURN: gl.constexpr = PLAN.turn
    inputs = ()
    targets = ()
    for t in gl.static_range(1, TURN):
        there = t < count
        x = gl.load(x_at + t * PLAN.sizes.width, mask=is_key & there, other=0.0)
        inputs = inputs + (x,)
        targets = targets + (gl.load(write_at + t, mask=there, other=-1),)
    return inputs, targets


@gluon.jit
def count_reader(arrived, slot, targets, zero, thread, PLAN: gl.constexpr):
    """Number of programs that read the window before this one, if a state goes back to its slot."""
    TURN: gl.constexpr = PLAN.turn
    in_place = targets[0] == slot
    for t in gl.static_range(1, TURN):
        in_place = in_place | (targets[t] == slot)
    before = zero
    if PLAN.sharers > 1:
        before = count_round(arrived, PLAN.sharers - 1, (thread == 0) & in_place)
    return before


@gluon.jit
def moves_window(places, slot, target, PLAN: gl.constexpr):
    """True in the one program that writes the new window of q and k to a slot.

    In place it is the last to have read the old one, of all that share it; elsewhere the first.
    """
    moves = gl.program_id(0) % PLAN.sharers == 0
    if PLAN.sharers > 1:
        last = as_word(load_shared4(places[5])) == PLAN.sharers - 1
        moves = gl.where(target == slot, last, moves)
    return moves


@gluon.jit
def store_factors(places, token, b, a, decay, dt_bias, thread, PLAN: gl.constexpr):
    """Leave the factors of a warp's token in shared memory."""
    warp, lane, zero_f32 = thread
    keys_at = places[0] + token * PLAN.key_bytes
    at = places[3] + token * 32
    q_norm, k_norm, q_k = norms(keys_at, keys_at + PLAN.half * 4, lane, zero_f32, PLAN.sizes.Dk)
    beta, g = gates(b, a, decay, dt_bias)
    words = (as_word(beta + zero_f32), as_word(gl.exp(g)), as_word(k_norm), as_word(q_norm))
    store_shared16(at, words, (lane == 0) & (warp < PLAN.turn))
    store_shared4(at + 16, q_k, (lane == 0) & (warp < PLAN.turn))


@gluon.jit
def after_token(S, t, places, before, first_row, own, thread, PLAN: gl.constexpr):
    """S after token t of a turn; S^T q and S^T k of the S before it are left in `places`.

    first_row, own: first of the thread's rows and columns; before: see `count_reader`.
    """
    ROWS: gl.constexpr = PLAN.rows
    warp, lane, zero_f32 = thread
    thread = warp * 32 + lane
    keys_at, values_at, totals_at, factors_at, _, before_at, sums_at = places
    totals_at += t * PLAN.value_bytes
    rows_at = keys_at + t * PLAN.key_bytes + first_row * 4
    q = row_values(rows_at, ROWS)
    k = row_values(rows_at + PLAN.half * 4, ROWS)
    store_products(sums_at, products(S, q, k, zero_f32, PLAN), first_row, warp, lane, own, PLAN)
    barrier()
    store_totals(sums_at, totals_at, thread, zero_f32, PLAN)
    if PLAN.sharers > 1:
        store_shared4(before_at, as_float(before), thread == 0)
    values = floats(values_at + t * PLAN.value_bytes + own * 4, 4)
    factors = floats(factors_at + t * 32, 4)
    barrier()
    Sk = floats(totals_at + (PLAN.columns + own) * 4, 4)
    u = ()
    for i in gl.static_range(4):
        u = u + (factors[2] * written(values[i], Sk[i], factors),)
    return updated_rows(S, factors[1], k, u, PLAN)


@gluon.jit
def written(v, Sk, factors):
    """Beta times the difference of v and the memory's answer to k, before the norm of k."""
    return factors[0] * (v - factors[1] * factors[2] * Sk)


@gluon.jit
def store_results(
    out_ptr, squares_ptr, places, base, count, head, split, thread, eps, PLAN: gl.constexpr
):  # fmt: skip
    """Results of a turn's tokens, a column a thread, and their squares."""
    Dv: gl.constexpr = PLAN.sizes.Dv
    COLUMNS: gl.constexpr = PLAN.columns
    GROUP: gl.constexpr = PLAN.group
    t = gl.minimum(thread // COLUMNS, PLAN.turn - 1)
    column = thread % COLUMNS
    at = places[2] + t * PLAN.value_bytes + column * 4
    Sq = load_shared4(at)
    Sk = load_shared4(at, COLUMNS * 4)
    at = places[1] + t * PLAN.value_bytes + column * 4
    v = load_shared4(at)
    gate = load_shared4(at, COLUMNS * 4)
    factors = floats(places[3] + t * 32, 4)
    q_k = load_shared4(places[3] + t * 32, 16)
    one = written(v, Sk, factors)
    y = factors[3] * (factors[1] * Sq + factors[2] * q_k * one)
    there = thread // COLUMNS < count
    squares = over_lanes(y * y, 1, GROUP)
    row = (base + t) * PLAN.sizes.Hv + head
    y *= gate
    one_each = there & (column % GROUP == 0)
    which = split * (COLUMNS // GROUP) + column // GROUP
    if PLAN.normed:
        at = places[4] + t * 16
        store_shared4(at + which * 4, squares, one_each)
        barrier()
        s = floats(at, 4)
        y *= gl.rsqrt((s[0] + s[1] + (s[2] + s[3])) / Dv + eps)
    else:
        gl.store(squares_ptr + (row * (Dv // GROUP) + which), squares, mask=one_each)
    at = out_ptr + (row * Dv + split * COLUMNS + column)
    gl.store(at, y.to(out_ptr.dtype.element_ty), mask=there)
