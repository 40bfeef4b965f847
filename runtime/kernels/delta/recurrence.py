"""Kernel of `delta_decode`: the recurrence of a value head, or of some of its columns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.delta.gates import gates
from lowbit.runtime.kernels.delta.heads import (
    convolved,
    load_before,
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
    stream16,
)
from lowbit.runtime.kernels.ptx.mma import as_float, as_word, threads


@gluon.jit
def recurrence_kernel(
    qkvz_ptr, ba_ptr, window_ptr, memory_ptr, arrived_ptr, starts_ptr, read_ptr, write_ptr,
    taps_ptr, decay_ptr, dt_bias_ptr, gain_ptr, out_ptr, squares_ptr, l2_eps, eps,
    Hk: gl.constexpr, Hv: gl.constexpr, Dk: gl.constexpr, Dv: gl.constexpr, W: gl.constexpr,
    WARPS: gl.constexpr, SHARED: gl.constexpr, SPLITS: gl.constexpr, TURN: gl.constexpr,
    UNIT: gl.constexpr, EACH: gl.constexpr, GROUP: gl.constexpr, NORMED: gl.constexpr,
    BUFFER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """SHARED: value heads that have a q and k together; SPLITS: programs of a value head.

    TURN: tokens that are convolved at a time; UNIT: rows of S that a thread sums one after another;
    EACH: rows of S that it has; GROUP: columns of one sum of squares; NORMED: whether a head is
    normed here.
    """
    C: gl.constexpr = 2 * Hk * Dk + Hv * Dv
    ROW: gl.constexpr = C + Hv * Dv  # of qkvz
    HALF: gl.constexpr = WARPS * 16  # threads
    COLUMNS: gl.constexpr = Dv // SPLITS
    LANES: gl.constexpr = COLUMNS // 4  # lanes that have a row of S, four columns each
    SLOT: gl.constexpr = Hv * Dk * Dv * 4  # bytes
    KEYS: gl.constexpr = HALF * 8  # bytes of a token in shared memory: q and k
    VALUES: gl.constexpr = COLUMNS * 8  # v and gain * silu(z); totals for q and for k
    warp, lane, zero, none = threads(WARPS)
    thread = warp * 32 + lane
    head = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    sequence = gl.program_id(1)
    first = gl.load(starts_ptr + sequence)
    end = gl.load(starts_ptr + sequence + 1)
    slot = gl.maximum(gl.load(read_ptr + sequence), 0)

    own = lane % LANES * 4  # column of those that the program has
    first_row = (warp * (32 // LANES) + lane // LANES) * EACH
    in_slot = head * (Dk * Dv) + gl.minimum(first_row, Dk - EACH) * Dv + split * COLUMNS + own
    memory = memory_ptr.to(gl.int64, bitcast=True) + in_slot.to(gl.int64) * 4
    S = ()
    for i in gl.static_range(EACH):
        S = S + (stream16(memory + slot.to(gl.int64) * SLOT + i * (Dv * 4)),)
    of_head = thread % HALF
    is_key = of_head < Dk
    qk = gl.where(thread >= HALF, Hk * Dk, 0) + head // SHARED * Dk + of_head  # channel
    turn = thread // (2 * COLUMNS)  # the token of a turn whose v or z this thread has
    is_z = thread % (2 * COLUMNS) >= COLUMNS
    value = head * Dv + split * COLUMNS + thread % COLUMNS
    vz = value + gl.where(is_z, C, 2 * Hk * Dk)  # channel
    is_value = (turn < TURN) & (turn < end - first)
    is_v = is_value & (thread % (2 * COLUMNS) < COLUMNS)
    window = window_ptr + slot.to(gl.int64) * ((W - 1) * C)
    qk_window = load_window(window, qk, is_key, C, W)
    v_window = load_window(window, vz, is_v, C, W)
    qk_taps = load_taps(taps_ptr, qk, is_key, W)
    v_taps = load_taps(taps_ptr, vz, is_v, W)
    gain = gl.load(gain_ptr + split * COLUMNS + thread % COLUMNS, mask=is_value & is_z, other=1.0)
    decay = gl.load(decay_ptr + head)
    dt_bias = gl.load(dt_bias_ptr + head)
    arrived = arrived_ptr.to(gl.int64, bitcast=True) + (slot * Hk + head // SHARED).to(gl.int64) * 4
    stage = shared_buffer(BUFFER) + zero
    values_at = stage + TURN * KEYS
    totals_at = values_at + TURN * VALUES
    factors_at = totals_at + TURN * VALUES
    squares_at = factors_at + TURN * 32
    before_at = squares_at + TURN * 16
    sums_at = before_at + 16
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    for base in range(first, end, TURN):
        count = gl.minimum(end - base, TURN)
        x_at = qkvz_ptr + (base * ROW + qk)
        qk_inputs = (gl.load(x_at, mask=is_key, other=0.0),)
        targets = (gl.load(write_ptr + base),)
        own_there = is_value & (turn < count)
        vz_input = gl.load(qkvz_ptr + ((base + turn) * ROW + vz), mask=own_there, other=0.0)
        v_target = gl.load(write_ptr + (base + turn), mask=is_v & own_there, other=-1)
        gated = gl.minimum(warp % TURN, count - 1)  # the token whose gates this warp has
        gates_at = ba_ptr + ((base + gated) * (2 * Hv) + head)
        b = gl.load(gates_at)
        a = gl.load(gates_at + Hv)
        v_before = v_window
        later_inputs = ()
        later_targets = ()
        for t in gl.static_range(1, TURN):
            later_inputs = later_inputs + (qk_inputs[0],)
            later_targets = later_targets + (gl.minimum(targets[0], -1),)
        if end - first > 1:
            later_inputs = ()
            later_targets = ()
            for t in gl.static_range(1, TURN):
                there = t < count
                x = gl.load(x_at + t * ROW, mask=is_key & there, other=0.0)
                later_inputs = later_inputs + (x,)
                at = write_ptr + base + t
                later_targets = later_targets + (gl.load(at, mask=there, other=-1),)
            v_before = load_before(
                v_window, qkvz_ptr, base - first + turn, base + turn, vz, is_v & own_there, ROW, W
            )
        inputs = qk_window + qk_inputs + later_inputs
        targets = targets + later_targets
        for t in gl.static_range(TURN):
            if t < count:
                y = convolved(part(inputs, t, W - 1), inputs[W - 1 + t], qk_taps, W)
                store_shared4(stage + (t * KEYS + thread * 4), silu(y), is_key)
        y = gl.where(is_z, vz_input.to(gl.float32), convolved(v_before, vz_input, v_taps, W))
        store_shared4(values_at + thread * 4, gain * silu(y), own_there)
        barrier()
        in_place = targets[0] == slot
        for t in gl.static_range(1, TURN):
            in_place = in_place | (targets[t] == slot)
        before = zero  # programs that have read the window they share, all threads of them
        if SHARED * SPLITS > 1:
            before = count_round(arrived + zero, SHARED * SPLITS - 1, (thread == 0) & in_place)
        new_window = window_ptr + v_target.to(gl.int64) * ((W - 1) * C)
        store_window(new_window, part(v_before, 1, W - 2) + (vz_input,), vz, v_target >= 0, C, W)
        keys_at = stage + gated * KEYS
        q_norm, k_norm, q_k = norms(keys_at, keys_at + HALF * 4, lane, none, l2_eps, Dk)
        beta, g = gates(b, a, decay, dt_bias)
        words = (as_word(beta + none), as_word(gl.exp(g)), as_word(k_norm), as_word(q_norm))
        store_shared16(factors_at + gated * 32, words, (lane == 0) & (warp < TURN))
        store_shared4(factors_at + gated * 32 + 16, q_k, (lane == 0) & (warp < TURN))
        for t in range(0, count):
            target = gl.load(write_ptr + base + t)
            rows_at = stage + t * KEYS + first_row * 4
            q = row_values(rows_at, EACH)
            k = row_values(rows_at + HALF * 4, EACH)
            whole = products(S, q, k, none, EACH, UNIT)
            store_products(sums_at, whole, first_row, warp, lane, own, Dk, EACH, WARPS, COLUMNS)
            barrier()
            store_totals(sums_at, totals_at + t * VALUES, thread, none, WARPS, COLUMNS)
            if SHARED * SPLITS > 1:
                store_shared4(before_at, as_float(before), thread == 0)
            values = floats(values_at + t * VALUES + own * 4, 4)
            factors = floats(factors_at + t * 32, 4)
            barrier()
            Sk = floats(totals_at + t * VALUES + (COLUMNS + own) * 4, 4)
            u = ()
            for i in gl.static_range(4):
                u = u + (factors[2] * written(values[i], Sk[i], factors),)
            rows = ()
            for i in gl.static_range(EACH):
                row = ()
                for j in gl.static_range(4):
                    row = row + (as_word(factors[1] * as_float(S[i][j]) + k[i] * u[j]),)
                rows = rows + (row,)
            S = rows
            if target >= 0:
                for i in gl.static_range(EACH):
                    row_at = memory + target.to(gl.int64) * SLOT + i * (Dv * 4)
                    store16(row_at, S[i], first_row < Dk)
        _results(
            out_ptr, squares_ptr, values_at, totals_at, factors_at, squares_at, base, count, head,
            split, thread, eps, Hv, Dv, COLUMNS, TURN, GROUP, NORMED,
        )  # fmt: skip
        for t in gl.static_range(TURN):
            if targets[t] >= 0:
                moves = gl.program_id(0) % (SHARED * SPLITS) == 0
                if SHARED * SPLITS > 1:
                    last = as_word(load_shared4(before_at)) == SHARED * SPLITS - 1
                    moves = gl.where(targets[t] == slot, last, moves)
                target_window = window_ptr + targets[t].to(gl.int64) * ((W - 1) * C)
                store_window(target_window, part(inputs, t + 1, W - 1), qk, is_key & moves, C, W)
        qk_window = part(inputs, TURN, W - 1)
        if base + TURN < end:
            barrier()


@gluon.jit
def written(v, Sk, factors):
    """Beta times what is new in v, before the norm of k."""
    return factors[0] * (v - factors[1] * factors[2] * Sk)


@gluon.jit
def _results(
    out_ptr, squares_ptr, values_at, totals_at, factors_at, squares_at, base, count, head, split,
    thread, eps, Hv: gl.constexpr, Dv: gl.constexpr, COLUMNS: gl.constexpr, TURN: gl.constexpr,
    GROUP: gl.constexpr, NORMED: gl.constexpr,
):  # fmt: skip
    """Results of a turn's tokens, a column a thread, and their squares."""
    t = gl.minimum(thread // COLUMNS, TURN - 1)
    column = thread % COLUMNS
    at = totals_at + t * (COLUMNS * 8) + column * 4
    Sq = load_shared4(at)
    Sk = load_shared4(at, COLUMNS * 4)
    at = values_at + t * (COLUMNS * 8) + column * 4
    v = load_shared4(at)
    gate = load_shared4(at, COLUMNS * 4)
    factors = floats(factors_at + t * 32, 4)
    q_k = load_shared4(factors_at + t * 32, 16)
    one = written(v, Sk, factors)
    y = factors[3] * (factors[1] * Sq + factors[2] * q_k * one)
    there = thread // COLUMNS < count
    squares = over_lanes(y * y, 1, GROUP)
    row = (base + t) * Hv + head
    y *= gate
    one_each = there & (column % GROUP == 0)
    which = split * (COLUMNS // GROUP) + column // GROUP
    if NORMED:
        store_shared4(squares_at + t * 16 + which * 4, squares, one_each)
        barrier()
        s = floats(squares_at + t * 16, 4)
        y *= gl.rsqrt((s[0] + s[1] + (s[2] + s[3])) / Dv + eps)
    else:
        gl.store(squares_ptr + (row * (Dv // GROUP) + which), squares, mask=one_each)
    at = out_ptr + (row * Dv + split * COLUMNS + column)
    gl.store(at, y.to(out_ptr.dtype.element_ty), mask=there)
