"""Device functions of the GEMV: steps of tiles loaded, and multiplied by x."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.mma import (
    load16,
    load_shared4,
    load_shared16,
    mma,
    pairs,
    raw_pairs,
    stream16,
    times16,
    unpacked_scales,
)


@gluon.jit
def load_steps(
    words, scales, step, G: gl.constexpr, BITS: gl.constexpr, K: gl.constexpr,
    R: gl.constexpr, C: gl.constexpr, STRIDE: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Words and raw scales of C steps of every tile of this program.

    words, scales: address of each tile for this lane; step: the first; STRIDE: to the next.
    """
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    GROUPS: gl.constexpr = (K + G - 1) // G
    STEP_K: gl.constexpr = 512 // BITS
    UNIT: gl.constexpr = min(STEP_K, G & -G)  # k of a step that surely share a scale
    loaded = ()
    raw = ()
    for r in gl.static_range(R):
        for c in gl.static_range(C):
            at = gl.minimum(step + c * STRIDE, STEPS - 1)
            here = words[r] + at.to(gl.int64) * 1024
            loaded = loaded + (stream16(here), stream16(here + 512))
            for part in gl.static_range(STEP_K // UNIT):
                group = gl.minimum((at * STEP_K + part * UNIT) // G, GROUPS - 1)
                if SCALES == "fp32":
                    here = scales[r] + group * 16
                    raw = raw + ((gl.load(here), gl.load(here + 1)),)
                else:
                    raw = raw + (gl.load(scales[r] + group * 8),)
    return loaded, raw


@gluon.jit
def _fragments(source, step, q, STAGED: gl.constexpr, K: gl.constexpr, BITS: gl.constexpr):
    """Four words of two k that a lane's q-th chunk multiplies, its token's column of B.

    source: where the first chunk of this lane's column is, in shared memory if STAGED.
    """
    STEP_K: gl.constexpr = 512 // BITS
    at = step * STEP_K + q * 32
    if K % STEP_K != 0:  # past K: any numbers, the weights there are zero
        at = gl.where(at + 32 <= K, at, 0)
    if STAGED:
        x = load_shared16(source + at * 2)
    else:
        x = load16(source + at.to(gl.int64) * 2)
    return x


@gluon.jit
def multiply_steps(
    acc, loaded, raw, sources, first, none, TAIL: gl.constexpr, C: gl.constexpr, G: gl.constexpr,
    BITS: gl.constexpr, K: gl.constexpr, R: gl.constexpr, NT: gl.constexpr, STRIDE: gl.constexpr,
    SCALES: gl.constexpr, STAGED: gl.constexpr, TWO: gl.constexpr, units=None,
):  # fmt: skip
    """Acc with what C loaded steps of every tile add; TAIL where a step may not exist.

    TWO: products of a step are summed in two chains, which halves the latency.
    units: address of the sums of 32 elements of x in shared memory: codes then enter the products
        with the constant of their place in BF16, whose share the sums begin without. None where
        codes are exact.
    """
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    Q: gl.constexpr = 16 // BITS  # chunks of a lane in a step
    GROUP_Q: gl.constexpr = min(Q, (G & -G) // 32)  # chunks that surely share a scale
    sums = _starts(units, first, none, 0, GROUP_Q, C, BITS, K, R * NT, STRIDE, TWO)
    for q in gl.static_range(Q):
        fragments = ()
        for c in gl.static_range(C):
            step = first + c * STRIDE
            for nt in gl.static_range(NT):
                x = _fragments(sources[nt], gl.minimum(step, STEPS - 1), q, STAGED, K, BITS)
                if TAIL:
                    x = _where(step < STEPS, x)
                fragments = fragments + (x,)
        sums = _multiply_chunks(sums, loaded, fragments, q, C, BITS, R, NT, units is not None, TWO)
        if (q + 1) % GROUP_Q == 0:
            total = ()
            for i in gl.static_range(R * NT):
                a = acc[i]
                for c in gl.static_range(C):
                    d = sums[c * (R * NT) + i][0]
                    if TWO:
                        e = sums[c * (R * NT) + i][1]
                        d = (d[0] + e[0], d[1] + e[1], d[2] + e[2], d[3] + e[3])
                    low, high = unpacked_scales(
                        raw[(i // NT * C + c) * (Q // GROUP_Q) + q // GROUP_Q], SCALES
                    )
                    a = (
                        a[0] + low * d[0],
                        a[1] + low * d[1],
                        a[2] + high * d[2],
                        a[3] + high * d[3],
                    )
                total = total + (a,)
            acc = total
            if q + 1 < Q:
                sums = _starts(units, first, none, q + 1, GROUP_Q, C, BITS, K, R * NT, STRIDE, TWO)
    return acc


@gluon.jit
def _starts(
    units, first, none, q: gl.constexpr, GROUP_Q: gl.constexpr, C: gl.constexpr,
    BITS: gl.constexpr, K: gl.constexpr, EACH: gl.constexpr, STRIDE: gl.constexpr,
    TWO: gl.constexpr,
):  # fmt: skip
    """What the sums of C steps begin with, the q-th chunks of all lanes and those after it."""
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    CONSTANT: gl.constexpr = 136.0 if BITS == 4 else 2304.0  # of a code, beside its value
    starts = ()
    for c in gl.static_range(C):
        start = none
        if units is not None:
            step = gl.minimum(first + c * STRIDE, STEPS - 1)
            for i in gl.static_range(GROUP_Q):
                start -= CONSTANT * load_shared4(units + (step * (16 // BITS) + q + i) * 4)
            start = gl.where(first + c * STRIDE < STEPS, start, 0.0)
        for _i in gl.static_range(EACH):
            one = (start, start, start, start)
            starts = starts + ((one, (none, none, none, none)) if TWO else (one,),)
    return starts


@gluon.jit
def _where(condition, x):
    return (
        gl.where(condition, x[0], 0),
        gl.where(condition, x[1], 0),
        gl.where(condition, x[2], 0),
        gl.where(condition, x[3], 0),
    )


@gluon.jit
def _multiply_chunks(
    sums, loaded, fragments, q: gl.constexpr, C: gl.constexpr, BITS: gl.constexpr,
    R: gl.constexpr, NT: gl.constexpr, RAW: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """Sums of every step, tile and block of tokens with the q-th chunks of all lanes."""
    new = ()
    for c in gl.static_range(C):
        for r in gl.static_range(R):
            low = loaded[2 * (r * C + c)]
            high = loaded[2 * (r * C + c) + 1]
            for nt in gl.static_range(NT):
                d = sums[(c * R + r) * NT + nt][0]
                e = sums[(c * R + r) * NT + nt][1] if TWO else d
                x = fragments[c * NT + nt]
                if BITS == 4:
                    l0, l1, l2, l3 = _code_pairs(low[q], BITS, RAW)
                    h0, h1, h2, h3 = _code_pairs(high[q], BITS, RAW)
                    d = mma(d, l0, h0, l1, h1, x[0], x[1])
                    e = mma(e if TWO else d, l2, h2, l3, h3, x[2], x[3])
                    d = d if TWO else e
                else:  # code = low nibble + 16 * (high nibble - 8)
                    for i in gl.static_range(2):
                        l0, l1, l2, l3 = _code_pairs(low[2 * q + i], BITS, RAW)
                        h0, h1, h2, h3 = _code_pairs(high[2 * q + i], BITS, RAW)
                        d = mma(d, l0, h0, l1, h1, x[2 * i], times16(x[2 * i]))
                        e = mma(
                            e if TWO else d, l2, h2, l3, h3, x[2 * i + 1], times16(x[2 * i + 1])
                        )
                        d = d if TWO else e
                new = new + ((d, e) if TWO else (d,),)
    return new


@gluon.jit
def _code_pairs(word, BITS: gl.constexpr, RAW: gl.constexpr):
    """Pairs of nibbles as BF16: 128 + n if RAW, else what they stand for in the code."""
    if RAW:
        out = raw_pairs(word)
    elif BITS == 4:
        out = pairs(word, 0xC308C308, 0xC308C308)  # - 136
    else:
        out = pairs(word, 0xC300C300, 0xC308C308)  # - 128 and - 136
    return out
