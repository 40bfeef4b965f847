"""Sums of a tile: of a warp's digits, of the warps that share it, of the programs that share it.

Neighbouring parts of a tile's steps are added first, then pairs of those, wherever the parts were
multiplied: so a token has the same bits in every launch with as many parts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.linear.gemm_store import swiglu
from lowbit.runtime.kernels.ptx.memory import (
    count_warp,
    load8,
    load_shared8,
    load_shared16,
    store8,
    store16,
    store_shared8,
    store_shared16,
    stream8_if,
)
from lowbit.runtime.kernels.ptx.mma import across, as_float, as_word, multiplied
from lowbit.runtime.thresholds import HALVED_TOKENS

BIAS = gl.constexpr(12582912.0)  # 1.5 * 2^23: its bits and an integer below 2^22 are their FP32 sum
MAGIC = gl.constexpr(0x4B400000)  # its bits
TOP_WEIGHT = gl.constexpr(32768.0)  # of a digit in the last plane


@gluon.constexpr_function
def halved(tokens):
    """True if two tokens share the columns of an `integer_mma`."""
    return tokens <= HALVED_TOKENS


@gluon.constexpr_function
def results_of(tokens):
    """Lanes of a warp that hold results of a tile, and tokens of each of them."""
    if halved(tokens):
        return (8 if tokens == 1 else 16), 1
    return 32, 2


@gluon.jit
def own_part(part, PARTS: gl.constexpr, X: gl.constexpr):
    """The number of a part among those of its program, where programs share a token's blocks."""
    if X.SHARERS > 1:
        part = part % (PARTS // X.SHARERS)
    return part


@gluon.jit
def leave_sums(acc, own, share, sums_at, PARTS: gl.constexpr, X: gl.constexpr):
    """Store the sums of a warp's tiles, for `sum_of_parts`."""
    LANES: gl.constexpr = results_of(X.TOKENS)[0]
    BYTES: gl.constexpr = 8 * results_of(X.TOKENS)[1]
    EACH: gl.constexpr = PARTS // X.SHARERS
    part = own_part(own[0], PARTS, X)
    at = sums_at + ((share * len(acc) * EACH + part) * LANES + own[3]) * BYTES
    for i in gl.static_range(len(acc)):
        store_sums(acc[i], at + i * (EACH * LANES * BYTES), own[2], halved(X.TOKENS))


@gluon.jit
def store_sums(a, at, held, HALVED: gl.constexpr):
    """Join the digits of a warp's sums and store them in shared or, where split, global memory."""
    if HALVED:
        low = a[0] + TOP_WEIGHT * across(a[0], 1)
        high = a[1] + TOP_WEIGHT * across(a[1], 1)
        store_shared8(at, (as_word(low), as_word(high)), held)
    else:
        joined = ()
        for j in gl.static_range(4):
            joined = joined + (as_word(a[j] + TOP_WEIGHT * a[4 + j]),)
        if at.dtype == gl.int64:
            store16(at, joined, held)
        else:
            store_shared16(at, joined, held)


@gluon.jit
def sum_of_parts(
    at, PARTS: gl.constexpr, HELD: gl.constexpr, COLUMNS: gl.constexpr,
    INTEGER: gl.constexpr = False,
):  # fmt: skip
    """The sums of all parts of a tile by `tree_sum`: 2 * COLUMNS of this lane, HELD lanes apart."""
    parts = ()
    for p in gl.static_range(PARTS):
        if COLUMNS == 1:
            parts = parts + (load_shared8(at + p * (HELD * 8)),)
        else:
            parts = parts + (load_shared16(at + p * (HELD * 16)),)
    return tree_sum(parts, 2 * COLUMNS, INTEGER)


@gluon.jit
def tree_sum(parts, COUNT: gl.constexpr, INTEGER: gl.constexpr = False):
    """COUNT numbers, each the sum of as many parts: neighbors are added, then pairs of them.

    So a half or a quarter of a power of two of parts is a sum itself, which other programs may add.
    """
    sums = ()
    for part in gl.static_range(len(parts)):
        own = ()
        for i in gl.static_range(COUNT):
            own = own + (parts[part][i] if INTEGER else as_float(parts[part][i]),)
        sums = sums + (own,)
    for _level in gl.static_range(len(parts)):
        if len(sums) > 1:
            fewer = ()
            for i in gl.static_range(len(sums) // 2):
                own = ()
                for j in gl.static_range(COUNT):
                    own = own + (sums[2 * i][j] + sums[2 * i + 1][j],)
                fewer = fewer + (own,)
            if len(sums) % 2 == 1:
                fewer = fewer + (sums[len(sums) - 1],)
            sums = fewer
    return sums[0]  # type: ignore[misc]


@gluon.jit
def join_programs(y, ptrs, tile, split, g, inside, SPLIT: gl.constexpr, held):
    """Add all programs' sums of a tile; `last` marks the warp that arrived last, which has them."""
    sums_ptr, arrived_ptr = ptrs
    at = sums_ptr.to(gl.int64, bitcast=True) + ((tile * (SPLIT * 8) + g) * 8).to(gl.int64)
    store8(at + split * 64, (as_word(y[0]), as_word(y[1])), held & inside)
    counter = arrived_ptr.to(gl.int64, bitcast=True) + tile.to(gl.int64) * 4
    last = inside & (count_warp(counter, SPLIT - 1, inside) == SPLIT - 1)
    parts = ()
    for i in gl.static_range(SPLIT):
        parts = parts + (stream8_if(at + i * 64, last & held),)
    return tree_sum(parts, 2), last


@gluon.jit
def store_result(
    y_ptr, low, high, added, tile, g, b, stored, N, PAIRED: gl.constexpr
):  # fmt: skip
    """Rows g and g + 8 of a tile for one token; of gate and up, where paired, the SwiGLU.

    added: to the two rows, or empty.
    """
    if PAIRED:
        n = tile * 8 + g
        act = low * high / (1.0 + gl.exp(-low))
        at = y_ptr + b * (N // 2) + n
        gl.store(at, act.to(y_ptr.dtype.element_ty), mask=stored & (n < N // 2))
    else:
        for half in gl.static_range(2):
            n = tile * 16 + half * 8 + g
            v = low if half == 0 else high
            if len(added) > 0:
                v += added[half]
            gl.store(y_ptr + b * N + n, v.to(y_ptr.dtype.element_ty), mask=stored & (n < N))


@gluon.jit
def group_starts(zero, SCALES: gl.constexpr):
    """Starts of the four integer sums of a group, for `added_term`.

    A sum that begins at BIAS becomes FP32 without a conversion: one FMA takes BIAS away and scales.
    Scales of 24 bits would round their product with BIAS.
    """
    start = zero
    if SCALES == "bf16" or SCALES == "fp16":
        start = zero + MAGIC
    return start, start, start, start


@gluon.jit
def added_term(before, product, scale, token, SCALES: gl.constexpr):
    """A sum and the product of a group, an integer below 2^22, times the scale of its row.

    product: from `group_starts` on. token: its scale; beside integer scales no part of the sum.
    """
    if SCALES == "int16":
        found = multiplied(product, scale, before)
    elif SCALES == "fp32":
        found = gl.fma(product.to(gl.float32) * scale, token, before)
    else:
        found = gl.fma(gl.fma(as_float(product), scale, scale * -BIAS), token, before)
    return found


@gluon.jit
def number_of(word, like):
    """A sum by its word, as another one is: FP32, or an integer."""
    if like.dtype == gl.float32:
        found = as_float(word)
    else:
        found = word
    return found


@gluon.jit
def scaled(sums, units):
    """Integer sums of a lane's tokens times the units of its rows g and g + 8, in turn two each."""
    found = ()
    for i in gl.static_range(len(sums)):
        found = found + (sums[i].to(gl.float32) * units[i // 2 % 2],)
    return found


@gluon.jit
def centre_of(row, token):
    """Start of a sum, by the bounds of its row and its token; see `formats.activations`."""
    return row * token


@gluon.jit
def row_numbers(rows_ptr, tile, lane):
    """Numbers of a lane's rows g and g + 8 of a tile: bounds, or units."""
    at = rows_ptr.to(gl.int64, bitcast=True) + ((tile * 8 + lane // 4) * 8).to(gl.int64)
    pair = load8(at)
    return as_float(pair[0]), as_float(pair[1])


@gluon.jit
def store_finished(
    y_ptr, low, high, factor, added, tile, g, b, stored, N, PAIRED: gl.constexpr
):  # fmt: skip
    """Store sums over groups of x in eight bits times a factor; see `store_result`.

    Every kernel rounds alike: what is added comes with one rounding, `fma(sum, factor, added)`, and
    the SwiGLU is that of `gemm`.
    """
    if len(added) > 0:
        low = gl.fma(low, factor, added[0])
        high = gl.fma(high, factor, added[1])
    else:
        low *= factor
        high *= factor
    if PAIRED:
        at = tile * 8 + g
        act = swiglu(low, high).to(y_ptr.dtype.element_ty)
        gl.store(y_ptr + b * (N // 2) + at, act, mask=stored & (at < N // 2))
    else:
        store_result(y_ptr, low, high, (), tile, g, b, stored, N, False)
