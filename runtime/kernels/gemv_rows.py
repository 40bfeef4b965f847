"""Device function of the GEMV: a few dense rows beside the packed weight, for the same x."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.access import (
    barrier,
    load_shared16,
    store_shared4,
    store_shared8,
    store_shared16,
    stream16,
)
from lowbit.runtime.kernels.gemv_stage import chunks_of, load_gains, sum_of_parts, total_of
from lowbit.runtime.kernels.mma import as_word, mma, words_where


@gluon.jit
def multiply_rows(
    x_ptr, gain_ptr, rows_ptr, y_ptr, buffer, warp, lane, none, eps,
    ROWS: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr, X_BYTES: gl.constexpr,
    PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """16 rows of `rms_norm(x) @ rows.T`, by the program of that number.

    BF16 as it is stored is what `mma` takes: a lane's 16 bytes of a row are the chunk of 8 columns
    that it has of every 32.
    """
    STEPS: gl.constexpr = K // 32
    S: gl.constexpr = (STEPS + WARPS - 1) // WARPS
    FP32: gl.constexpr = gain_ptr.dtype.element_ty == gl.float32
    AHEAD: gl.constexpr = S if S < 8 else 8  # steps on their way before the wait
    g = lane // 4
    t = lane % 4
    thread = warp * 32 + lane
    n = gl.program_id(0) * 16 + g
    rows = rows_ptr.to(gl.int64, bitcast=True) + t * 16
    low = rows + gl.minimum(n, ROWS - 1).to(gl.int64) * (2 * K)
    high = rows + gl.minimum(n + 8, ROWS - 1).to(gl.int64) * (2 * K)
    loaded = _load_rows(low, high, warp, STEPS, AHEAD, WARPS)
    gains = load_gains(gain_ptr, thread, K, WARPS * 32)
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    chunks, squares = chunks_of(x_ptr, gains, thread, lane, none, K, WARPS * 32, True, FP32)
    for first in gl.static_range(0, K // 8, WARPS * 32):
        at = buffer + (first + thread) * 16
        store_shared16(at, chunks[first // (WARPS * 32)], first + thread < K // 8)
    squares_at = buffer + X_BYTES
    store_shared4(squares_at + thread * 4, squares, thread >= 0)
    barrier()
    factor = gl.rsqrt(total_of(squares_at + lane * 4, none, WARPS) / K + eps)
    d = (none, none, none, none)
    e = (none, none, none, none)
    for first in gl.static_range(0, S, AHEAD):
        for c in gl.static_range(AHEAD if first + AHEAD <= S else S - first):
            step = warp + (first + c) * WARPS
            x = load_shared16(buffer + gl.minimum(step, STEPS - 1) * 64 + t * 16)
            if (first + c + 1) * WARPS > STEPS:
                there = step < STEPS
                x = words_where(there, x)
            a = loaded[2 * c]
            b = loaded[2 * c + 1]
            d = mma(d, a[0], b[0], a[1], b[1], x[0], x[1])
            e = mma(e, a[2], b[2], a[3], b[3], x[2], x[3])
        if first + AHEAD < S:
            loaded = _load_rows(low, high, warp + (first + AHEAD) * WARPS, STEPS, AHEAD, WARPS)
    sums_at = squares_at + WARPS * 128 + g * 8
    store_shared8(sums_at + warp * 64, (as_word(d[0] + e[0]), as_word(d[2] + e[2])), t == 0)
    barrier()
    y = sum_of_parts(sums_at, none, WARPS, 8, 1)
    stored = (warp == 0) & (t == 0)
    element: gl.constexpr = y_ptr.dtype.element_ty
    gl.store(y_ptr + n, (y[0] * factor).to(element), mask=stored & (n < ROWS))
    gl.store(y_ptr + n + 8, (y[1] * factor).to(element), mask=stored & (n + 8 < ROWS))


@gluon.jit
def _load_rows(
    low, high, step, STEPS: gl.constexpr, COUNT: gl.constexpr, STRIDE: gl.constexpr
):  # fmt: skip
    """16 bytes of two rows for each of COUNT steps."""
    loaded = ()
    for c in gl.static_range(COUNT):
        at = gl.minimum(step + c * STRIDE, STEPS - 1).to(gl.int64) * 64
        loaded = loaded + (stream16(low + at), stream16(high + at))
    return loaded
