"""Device functions of the delta rule: gates, a head's inputs, its products with S, norms of q, k.

But for `gates`, values are those of `mma`: what each lane holds, tensors of one element a thread.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.delta.program import L2_EPS
from lowbit.runtime.kernels.ptx.memory import (
    floats,
    load_shared4,
    store_shared4,
    store_shared16,
    stream16,
    stream16_if,
)
from lowbit.runtime.kernels.ptx.mma import across, as_float, as_word


@triton.jit
def gates(b, a, decay, dt_bias):
    """Beta, the share of v's new part that is written, and g, the log decay, in FP32.

    beta = sigmoid(b), g = decay * softplus(a + dt_bias), of scalars or a block of tokens.
    """
    x = a.to(tl.float32) + dt_bias
    # log(1 + e) with the digits of e that 1 + e drops given back: small steps are long memories.
    e = tl.exp(-tl.abs(x))
    whole = 1.0 + e
    log1p = tl.where(whole == 1.0, e, tl.log(whole) * (e / tl.maximum(whole - 1.0, 1e-9)))
    return tl.sigmoid(b.to(tl.float32)), decay * (tl.maximum(x, 0.0) + log1p)


@gluon.jit
def load_taps(taps_ptr, channel, inside, W: gl.constexpr):
    """The W taps of a channel."""
    taps = ()
    if W == 4:
        words = stream16_if(taps_ptr.to(gl.int64, bitcast=True) + channel.to(gl.int64) * 16, inside)
        for tap in gl.static_range(W):
            taps = taps + (as_float(words[tap]),)
    else:
        for tap in gl.static_range(W):
            taps = taps + (gl.load(taps_ptr + channel * W + tap, mask=inside, other=0.0),)
    return taps


@gluon.jit
def load_window(window_ptr, slot, channel, inside, SIZES: gl.constexpr):
    """The last W - 1 inputs of a channel in a slot, oldest first."""
    W: gl.constexpr = SIZES.W
    window_ptr += slot.to(gl.int64) * ((W - 1) * SIZES.C)
    rows = ()
    for row in gl.static_range(W - 1):
        rows = rows + (gl.load(window_ptr + row * SIZES.C + channel, mask=inside, other=0.0),)
    return rows


@gluon.jit
def store_window(window_ptr, slot, rows, channel, inside, SIZES: gl.constexpr):
    """Store the last W - 1 inputs of a channel in a slot, oldest first."""
    W: gl.constexpr = SIZES.W
    window_ptr += slot.to(gl.int64) * ((W - 1) * SIZES.C)
    for row in gl.static_range(W - 1):
        gl.store(window_ptr + row * SIZES.C + channel, rows[row], mask=inside)


@gluon.jit
def load_before(window, qkvz_ptr, position, token, channel, inside, SIZES: gl.constexpr):
    """The W - 1 inputs before a token, from the window or from qkvz.

    position: of the token, counted from the first after the window.
    """
    W: gl.constexpr = SIZES.W
    rows = ()
    for tap in gl.static_range(W - 1):
        back = W - 1 - tap
        old = window[0]
        for row in gl.static_range(1, W - 1):
            old = gl.where(position - back == row - (W - 1), window[row], old)
        new = inside & (position >= back)
        at = qkvz_ptr + ((token - back) * SIZES.width + channel)
        rows = rows + (gl.load(at, mask=new, other=old),)
    return rows


@gluon.jit
def convolved(before, x, taps, W: gl.constexpr):
    """Convolution of a channel's input x and the W - 1 before it, in FP32."""
    y = before[0].to(gl.float32) * taps[0]
    for row in gl.static_range(1, W - 1):
        y += before[row].to(gl.float32) * taps[row]
    return y + x.to(gl.float32) * taps[W - 1]


@gluon.jit
def silu(x):
    """`x * sigmoid(x)` in FP32."""
    return x / (1.0 + gl.exp(-x))


@gluon.jit
def part(values, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """COUNT of a tuple's values, from number FIRST on."""
    found = ()
    for i in gl.static_range(COUNT):
        found = found + (values[FIRST + i],)
    return found


@gluon.jit
def over_lanes(x, FIRST: gl.constexpr, LANES: gl.constexpr):
    """Sums of x over the lanes whose numbers differ only in bits FIRST to LANES / 2."""
    for i in gl.static_range(5):
        if (1 << i) >= FIRST and (1 << i) < LANES:
            x += across(x, 1 << i)
    return x


@gluon.jit
def load_rows(address, PLAN: gl.constexpr):
    """A thread's rows of S, four columns of each, as words."""
    ROWS: gl.constexpr = PLAN.rows
    rows = ()
    for i in gl.static_range(ROWS):
        rows = rows + (stream16(address + i * (PLAN.sizes.Dv * 4)),)
    return rows


@gluon.jit
def updated_rows(S, fade, k, u, PLAN: gl.constexpr):
    """A thread's rows of `fade * S + k u^T`, as words."""
    ROWS: gl.constexpr = PLAN.rows
    rows = ()
    for i in gl.static_range(ROWS):
        row = ()
        for j in gl.static_range(4):
            row = row + (as_word(fade * as_float(S[i][j]) + k[i] * u[j]),)
        rows = rows + (row,)
    return rows


@gluon.jit
def row_values(at, ROWS: gl.constexpr):
    """Values of ROWS rows side by side in shared memory."""
    values = ()
    if ROWS % 4 == 0:
        values = floats(at, ROWS)
    else:
        for i in gl.static_range(ROWS):
            values = values + (load_shared4(at + i * 4),)
    return values


@gluon.jit
def products(S, q, k, zero_f32, PLAN: gl.constexpr):
    """S^T q and S^T k over a thread's rows of S, four columns each.

    Rows of a unit are summed one after another, then units in pairs, as lanes are. So the order of
    a sum does not depend on how many rows a thread has.
    """
    UNIT: gl.constexpr = PLAN.unit
    UNITS: gl.constexpr = PLAN.rows // PLAN.unit
    sums = ()
    for unit in gl.static_range(UNITS):
        part_q = (zero_f32, zero_f32, zero_f32, zero_f32)
        part_k = (zero_f32, zero_f32, zero_f32, zero_f32)
        for i in gl.static_range(UNIT):
            part_q = _add4(part_q, S[unit * UNIT + i], q[unit * UNIT + i])
            part_k = _add4(part_k, S[unit * UNIT + i], k[unit * UNIT + i])
        sums = sums + (part_q + part_k,)
    whole = sums[0]  # type: ignore[misc]
    if UNITS == 2:
        whole = _sum8(sums[0], sums[1])  # type: ignore[misc]
    if UNITS == 4:
        whole = _sum8(_sum8(sums[0], sums[1]), _sum8(sums[2], sums[3]))  # type: ignore[misc]
    return whole


@gluon.jit
def _add4(sums, words, factor):
    return (
        sums[0] + as_float(words[0]) * factor,
        sums[1] + as_float(words[1]) * factor,
        sums[2] + as_float(words[2]) * factor,
        sums[3] + as_float(words[3]) * factor,
    )


@gluon.jit
def _sum8(a, b):
    total = ()
    for i in gl.static_range(8):
        total = total + (a[i] + b[i],)
    return total


@gluon.jit
def store_products(at, whole, first_row, warp, lane, own, PLAN: gl.constexpr):
    """A warp's products, of q and then of k, in shared memory: [2, warps, columns]."""
    WARPS: gl.constexpr = PLAN.warps
    LANES: gl.constexpr = PLAN.lanes
    Dk: gl.constexpr = PLAN.sizes.Dk
    for which in gl.static_range(2):
        words = ()
        for i in gl.static_range(4):
            y = whole[which * 4 + i]
            if Dk < WARPS * (32 // LANES) * PLAN.rows:
                y = gl.where(first_row < Dk, y, 0.0)
            words = words + (as_word(over_lanes(y, LANES, 32)),)
        store_shared16(at + ((which * WARPS + warp) * PLAN.columns + own) * 4, words, lane < LANES)


@gluon.jit
def store_totals(sums_at, totals_at, thread, zero_f32, PLAN: gl.constexpr):
    """Products summed over the warps, in shared memory: [2, columns]."""
    WARPS: gl.constexpr = PLAN.warps
    COLUMNS: gl.constexpr = PLAN.columns
    which = gl.where(thread >= PLAN.half, 1, 0)
    column = thread % PLAN.half
    at = sums_at + (which * (WARPS * COLUMNS) + gl.minimum(column, COLUMNS - 1)) * 4
    total = zero_f32
    for w in gl.static_range(WARPS):
        total += load_shared4(at, w * COLUMNS * 4)
    store_shared4(totals_at + (which * COLUMNS + column) * 4, total, column < COLUMNS)


@gluon.jit
def norms(q_at, k_at, lane, zero_f32, Dk: gl.constexpr):
    """Factors of q (its norm and scale) and of k (its norm), and q . k before them."""
    qq = zero_f32
    kk = zero_f32
    qk = zero_f32
    if Dk == 128:
        q = floats(q_at + lane * 16, 4)
        k = floats(k_at + lane * 16, 4)
        for i in gl.static_range(4):
            qq += q[i] * q[i]
            kk += k[i] * k[i]
            qk += q[i] * k[i]
    else:
        for first in gl.static_range(0, Dk, 32):
            there = first + lane < Dk
            q = gl.where(there, load_shared4(q_at + (first + lane) * 4), 0.0)
            k = gl.where(there, load_shared4(k_at + (first + lane) * 4), 0.0)
            qq += q * q
            kk += k * k
            qk += q * k
    q_norm = gl.rsqrt(over_lanes(qq, 1, 32) + L2_EPS) * Dk**-0.5
    k_norm = gl.rsqrt(over_lanes(kk, 1, 32) + L2_EPS)
    return q_norm, k_norm, over_lanes(qk, 1, 32)
