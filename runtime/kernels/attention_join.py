"""Device functions: the splits of an attention head become one result."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.access import load4, load16
from lowbit.runtime.kernels.mma import as_float, high_half, low_half


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
