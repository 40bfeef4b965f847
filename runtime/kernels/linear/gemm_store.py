"""Device functions of `gemm`: sums joined over splits of K, and stored."""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.memory import await_published, publish, store16, stream16
from lowbit.runtime.kernels.ptx.mma import as_float, as_word, bf16_pair, high_half, low_half, turned

WARPS = gl.constexpr(8)  # of a program: two warpgroups, a tile each warp


@gluon.jit
def joined(acc, parts_ptr, counts_ptr, unit, warp, lane, PLAN: gl.constexpr):
    """The sums of some tokens of a warp's tile, added over all splits of its block in order.

    Every split leaves its own in memory, and adds those of as many tokens as the others do. It
    waits for the others: there are no more programs than multiprocessors, so all run, and what one
    waits for never waits for a later unit.

    Returns:
        The sums, and the first of their tokens.
    """
    SPLITS: gl.constexpr = PLAN.SPLITS
    COUNT: gl.constexpr = PLAN.TOKENS // 2 // SPLITS  # of a lane
    TILE_BYTES: gl.constexpr = 64 * PLAN.TOKENS  # of 16 rows
    BYTES: gl.constexpr = WARPS * TILE_BYTES  # of a split
    block = unit // SPLITS
    split = unit % SPLITS
    counts = counts_ptr.to(gl.int64, bitcast=True) + ((block * WARPS + warp) * 4).to(gl.int64)
    sums = parts_ptr.to(gl.int64, bitcast=True) + (warp * TILE_BYTES + lane * 16).to(gl.int64)
    sums += (block * SPLITS).to(gl.int64) * BYTES
    own = sums + split.to(gl.int64) * BYTES
    for i in gl.static_range(0, len(acc), 4):
        words = as_word(acc[i]), as_word(acc[i + 1]), as_word(acc[i + 2]), as_word(acc[i + 3])
        store16(own + i * 128, words, lane >= 0)
    publish(counts, lane)
    await_published(counts, SPLITS)
    sums += split.to(gl.int64) * (COUNT * 128)
    added = ()
    for i in gl.static_range(0, COUNT, 4):
        total = ()
        for s in gl.static_range(SPLITS):
            words = stream16(sums, s * BYTES + i * 128)
            new = ()
            for j in gl.static_range(4):
                one = as_float(words[j])
                new = new + (one if s == 0 else total[j] + one,)
            total = new
        added = added + total
    return added, split * (PLAN.TOKENS // SPLITS)


@gluon.constexpr_function
def _batch_of(count):
    return math.gcd(8, count)


@gluon.jit
def load_added(
    added_ptr, first_token, tile, lane, M, N, stride, COUNT: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """The addends of a warp's rows of 8 * COUNT tokens, as `store_block` takes them."""
    HALVES: gl.constexpr = 1 if PLAN.PAIRED else 2
    column = tile * (8 * HALVES) + lane % 4 * 2
    added = ()
    for i in gl.static_range(COUNT):
        token = first_token + i * 8 + lane // 4
        for half in gl.static_range(HALVES):
            inside = (token < M) & (column + half * 8 < N)
            at = added_ptr + (token.to(gl.int64) * stride + column + half * 8) // 2
            added = added + (gl.load(at, mask=inside, other=0),)
    return added


@gluon.jit
def store_block(
    acc, added_ptr, given, out_ptr, first_token, tile, lane, M, N, stride, factors,
    PLAN: gl.constexpr, SUMMED: gl.constexpr = False,
):  # fmt: skip
    """Store a warp's rows of some tokens: 8 tokens and 8 rows at a time.

    out_ptr: to FP32, or to pairs of BF16, which are turned by `movmatrix`.
    given: what is added, if it has been loaded by `load_added`; else it is loaded here.
    factors: of the sums, if any: for each 8 tokens those of the lane's two. What is added is so
        with one rounding, `fma(sum, factor, added)`.
    SUMMED: store the sums of rows 2 t and 2 t + 1 of x as that of token t, in FP32.
    """
    FACTORS: gl.constexpr = len(factors) > 0
    GIVEN: gl.constexpr = len(given) > 0
    COUNT: gl.constexpr = len(acc) // 4  # of 8 tokens
    BATCH: gl.constexpr = COUNT if GIVEN else _batch_of(COUNT)  # whose additions are there together
    HALVES: gl.constexpr = 1 if PLAN.PAIRED else 2
    column = tile * (8 * HALVES) + lane % 4 * 2
    for batch in gl.static_range(0, COUNT, BATCH):
        before = given
        if added_ptr is not None and not GIVEN:
            before = load_added(
                added_ptr, first_token + batch * 8, tile, lane, M, N, stride, BATCH, PLAN
            )
        for i in gl.static_range(BATCH):
            token = first_token + (batch + i) * 8 + lane // 4
            for half in gl.static_range(HALVES):
                first = acc[4 * (batch + i) + 2 * half]
                second = acc[4 * (batch + i) + 2 * half + 1]
                if PLAN.PAIRED and FACTORS:
                    own = factors[batch + i]
                    first = swiglu(first * own[0], acc[4 * (batch + i) + 2] * own[0])
                    second = swiglu(second * own[1], acc[4 * (batch + i) + 3] * own[1])
                elif PLAN.PAIRED:
                    first = swiglu(first, acc[4 * (batch + i) + 2])
                    second = swiglu(second, acc[4 * (batch + i) + 3])
                elif FACTORS and added_ptr is None:
                    first *= factors[batch + i][0]
                    second *= factors[batch + i][1]
                if added_ptr is not None:
                    pair = turned(before[i * HALVES + half])
                    if FACTORS:
                        first = gl.fma(first, factors[batch + i][0], low_half(pair))
                        second = gl.fma(second, factors[batch + i][1], high_half(pair))
                    else:
                        first += low_half(pair)
                        second += high_half(pair)
                if out_ptr.dtype.element_ty == gl.float32:
                    at = first_token + (batch + i) * 8 + lane % 4 * 2
                    row = tile * (8 * HALVES) + half * 8 + lane // 4
                    if SUMMED:
                        out = out_ptr + ((at // 2).to(gl.int64) * N + row)
                        gl.store(out, first + second, mask=(at < M) & (row < N))
                    else:
                        _store_floats(out_ptr, (first, second), at, row, M, N)
                else:
                    word = turned(bf16_pair(first, second))
                    inside = (token < M) & (column + half * 8 < N)
                    at = out_ptr + (token.to(gl.int64) * N + column + half * 8) // 2
                    gl.store(at, word, mask=inside)


@gluon.jit
def _store_floats(out_ptr, values, token, column, M, N):
    """Store a lane's values of two tokens; eight lanes have those of a token side by side."""
    for i in gl.static_range(2):
        at = out_ptr + ((token + i).to(gl.int64) * N + column)
        gl.store(at, values[i], mask=(token + i < M) & (column < N))


@gluon.jit
def swiglu(gate, up):
    """silu(gate) * up."""
    return gate / (1.0 + gl.exp(-gate)) * up
