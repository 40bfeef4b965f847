"""Device functions: what warps, and splits, know of an attention head becomes one result."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.access import (
    barrier,
    floats,
    load4,
    load16,
    store_shared4,
    store_shared16,
)
from lowbit.runtime.kernels.mma import as_float, as_word, from_lane, high_half, low_half


@gluon.jit
def weigh_warps(
    top, total, acc, new_score, own_new, buffer, sums_at, warp, g, t, QUAD: gl.constexpr,
    PAIRS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """What each warp's sums weigh, for heads 2 * t and 2 * t + 1 of this lane; sums are stored.

    top, total, new_score: of head g; own_new: whether the new token counts here; buffer: shared
    memory for 16 numbers of each warp; sums_at: of this lane's, QUAD bytes each.

    Returns:
        Of each of the two heads the highest score, the sum of weights and its inverse; the weight
        of every warp's sums, the second head's after the first's; that of the new value.
    """
    totals_at = buffer + 32 * WARPS
    mine = (g * WARPS + warp) * 4
    store_shared4(buffer + mine, top, t == 0)
    store_shared4(totals_at + mine, total, t == 0)
    for quad in gl.static_range(len(acc)):
        c = acc[quad]
        words = (as_word(c[0]), as_word(c[1]), as_word(c[2]), as_word(c[3]))
        store_shared16(sums_at + (warp * len(acc) + quad) * QUAD, words, t < PAIRS)
    barrier()
    tops = ()
    wholes = ()
    inverses = ()
    weights = ()
    news = ()
    for i in gl.static_range(2):
        of_head = (2 * t + i) * (4 * WARPS)
        own = floats(buffer + of_head, WARPS)
        totals = floats(totals_at + of_head, WARPS)
        new_of = from_lane(new_score, t * 8 + 4 * i)
        highest = new_of
        for w in gl.static_range(WARPS):
            highest = gl.maximum(highest, own[w])
        new_weight = gl.where(own_new, gl.exp2(new_of - highest), 0.0)
        whole = new_weight
        for w in gl.static_range(WARPS):
            weight = gl.exp2(own[w] - highest)
            whole += weight * totals[w]
            weights = weights + (weight,)
        tops = tops + (highest,)
        wholes = wholes + (whole,)
        inverses = inverses + (1.0 / whole,)
        news = news + (new_weight,)
    return tops, wholes, inverses, weights, news


@gluon.jit
def join_splits(
    part_ptr, state_ptr, qkv_ptr, out_ptr, head, running, warp, lane, none,
    SHARED: gl.constexpr, GATED: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The heads of all splits, in order, a warp a head: done by the program that came last."""
    AT_ONCE: gl.constexpr = min(SPLITS, 16 if D <= 128 else 8)  # registers
    EACH: gl.constexpr = (D + 127) // 128  # blocks of four elements of a lane
    for first_head in gl.static_range(0, SHARED, WARPS):
        h = first_head + warp
        q_head = head * SHARED + gl.minimum(h, SHARED - 1)
        part = part_ptr.to(gl.int64, bitcast=True) + (q_head * SPLITS).to(gl.int64) * (4 * D)
        state = state_ptr + q_head * SPLITS * 2
        highest = none + float("-inf")
        whole = none
        sums = ()
        for i in gl.static_range(4 * EACH):
            sums = sums + (none,)
        for start in range(0, running, AT_ONCE):
            tops = ()
            totals = ()
            parts = ()
            for s in gl.static_range(AT_ONCE):
                at = gl.minimum(start + s, running - 1)
                inside = start + s < running
                tops = tops + (gl.where(inside, gl.load(state + 2 * at), float("-inf")),)
                totals = totals + (gl.load(state + 2 * at + 1),)
                for i in gl.static_range(EACH):
                    d = gl.minimum(128 * i + 4 * lane, D - 4)
                    parts = parts + (load16(part + (at * D + d).to(gl.int64) * 4),)
            new = highest
            for s in gl.static_range(AT_ONCE):
                new = gl.maximum(new, tops[s])
            fade = gl.exp2(highest - new)
            highest = new
            whole *= fade
            faded = ()
            for i in gl.static_range(4 * EACH):
                faded = faded + (sums[i] * fade,)
            for s in gl.static_range(AT_ONCE):
                weight = gl.exp2(tops[s] - highest)
                whole += weight * totals[s]
                added = ()
                for i in gl.static_range(4 * EACH):
                    added = added + (faded[i] + weight * as_float(parts[s * EACH + i // 4][i % 4]),)
                faded = added
            sums = faded
        gates = ()
        for i in gl.static_range(2 * EACH if GATED else 0):
            d = gl.minimum(128 * (i // 2) + 4 * lane + i % 2 * 2, D - 2)
            gate = qkv_ptr.to(gl.int64, bitcast=True) + (q_head * (2 * D) + D + d).to(gl.int64) * 2
            gates = gates + (load4(gate),)
        for i in gl.static_range(4 * EACH):
            d = 128 * (i // 4) + 4 * lane + i % 4
            y = sums[i] / whole
            if GATED:
                gate = gates[i // 2]
                y /= 1.0 + gl.exp(-(low_half(gate) if i % 2 == 0 else high_half(gate)))
            stored = (h < SHARED) & (d < D)
            gl.store(out_ptr + q_head * D + d, y.to(out_ptr.dtype.element_ty), mask=stored)
