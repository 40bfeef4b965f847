"""Device functions of `delta_decode`: inputs of a head, its products with S, norms of q and k.

Values are those of `mma`: what each lane holds, tensors of one element a thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.memory import (
    floats,
    load_shared4,
    store_shared4,
    store_shared16,
    stream16_if,
)
from lowbit.runtime.kernels.ptx.mma import across, as_float, as_word


@gluon.jit
def load_taps(taps_ptr, channel, inside, W: gl.constexpr):
    """The taps of a channel."""
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
def load_window(window_ptr, channel, inside, C: gl.constexpr, W: gl.constexpr):
    """The last W - 1 inputs of a channel, oldest first."""
    rows = ()
    for row in gl.static_range(W - 1):
        rows = rows + (gl.load(window_ptr + row * C + channel, mask=inside, other=0.0),)
    return rows


@gluon.jit
def store_window(window_ptr, rows, channel, inside, C: gl.constexpr, W: gl.constexpr):
    """Inverse of `load_window`."""
    for row in gl.static_range(W - 1):
        gl.store(window_ptr + row * C + channel, rows[row], mask=inside)


@gluon.jit
def load_before(
    window, qkvz_ptr, position, token, channel, inside, ROW: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """The W - 1 inputs before a token at a position after the window, from it or from qkvz."""
    rows = ()
    for tap in gl.static_range(W - 1):
        back = W - 1 - tap
        old = window[0]
        for row in gl.static_range(1, W - 1):
            old = gl.where(position - back == row - (W - 1), window[row], old)
        new = inside & (position >= back)
        at = qkvz_ptr + ((token - back) * ROW + channel)
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
    """COUNT values from FIRST on."""
    found = ()
    for i in gl.static_range(COUNT):
        found = found + (values[FIRST + i],)
    return found


@gluon.jit
def over_lanes(x, FIRST: gl.constexpr, LANES: gl.constexpr):
    """Sums over lanes whose numbers differ in bits FIRST to LANES / 2."""
    for i in gl.static_range(5):
        if (1 << i) >= FIRST and (1 << i) < LANES:
            x += across(x, 1 << i)
    return x


@gluon.jit
def products(S, q, k, none, EACH: gl.constexpr, UNIT: gl.constexpr):
    """S^T q and S^T k over a thread's EACH rows of S, four columns each.

    UNIT rows are summed one after another, then units in pairs, as lanes are: so the order of a sum
    does not depend on how many rows a thread has.
    """
    sums = ()
    for unit in gl.static_range(EACH // UNIT):
        part_q = (none, none, none, none)
        part_k = (none, none, none, none)
        for i in gl.static_range(UNIT):
            part_q = _add4(part_q, S[unit * UNIT + i], q[unit * UNIT + i])
            part_k = _add4(part_k, S[unit * UNIT + i], k[unit * UNIT + i])
        sums = sums + (part_q + part_k,)
    whole = sums[0]  # type: ignore[misc]
    if EACH // UNIT == 2:
        whole = _sum8(sums[0], sums[1])  # type: ignore[misc]
    if EACH // UNIT == 4:
        whole = _sum8(_sum8(sums[0], sums[1]), _sum8(sums[2], sums[3]))  # type: ignore[misc]
    return whole


@gluon.jit
def row_values(at, EACH: gl.constexpr):
    """Values of EACH rows side by side in shared memory."""
    values = ()
    if EACH % 4 == 0:
        values = floats(at, EACH)
    else:
        for i in gl.static_range(EACH):
            values = values + (load_shared4(at + i * 4),)
    return values


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
def store_products(
    at, whole, first_row, warp, lane, own, Dk: gl.constexpr, EACH: gl.constexpr,
    WARPS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """A warp's products, of q and then of k, in shared memory: [2, WARPS, COLUMNS]."""
    LANES: gl.constexpr = COLUMNS // 4
    for which in gl.static_range(2):
        words = ()
        for i in gl.static_range(4):
            y = whole[which * 4 + i]
            if Dk < WARPS * (32 // LANES) * EACH:
                y = gl.where(first_row < Dk, y, 0.0)
            words = words + (as_word(over_lanes(y, LANES, 32)),)
        store_shared16(at + ((which * WARPS + warp) * COLUMNS + own) * 4, words, lane < LANES)


@gluon.jit
def store_totals(sums_at, totals_at, thread, none, WARPS: gl.constexpr, COLUMNS: gl.constexpr):
    """Products summed over the warps, in shared memory: [2, COLUMNS]."""
    HALF: gl.constexpr = WARPS * 16
    which = gl.where(thread >= HALF, 1, 0)
    column = thread % HALF
    at = sums_at + (which * (WARPS * COLUMNS) + gl.minimum(column, COLUMNS - 1)) * 4
    total = none
    for w in gl.static_range(WARPS):
        total += load_shared4(at, w * COLUMNS * 4)
    store_shared4(totals_at + (which * COLUMNS + column) * 4, total, column < COLUMNS)


@gluon.jit
def norms(q_at, k_at, lane, none, l2_eps, Dk: gl.constexpr):
    """Factors that norm q (and scale it) and k, and q . k before them."""
    qq = none
    kk = none
    qk = none
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
    q_norm = gl.rsqrt(over_lanes(qq, 1, 32) + l2_eps) * Dk**-0.5
    k_norm = gl.rsqrt(over_lanes(kk, 1, 32) + l2_eps)
    return q_norm, k_norm, over_lanes(qk, 1, 32)
