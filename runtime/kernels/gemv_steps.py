"""Device functions of the GEMV: steps of tiles loaded, and multiplied by x."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.access import load4, load8, load16, stream16
from lowbit.runtime.kernels.mma import mma, pairs, times16, unpacked_scales, words_where


@gluon.jit
def load_steps(
    words, scales, part, FIRST: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr,
    K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, PARTS: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Words and raw scales of C steps of every tile of this program, the FIRST and those after it.

    words: address of this warp's own first step of each tile, for this lane; scales: of the tile's
    first group; part: number of the warp's first step, from there every PARTS-th is its.
    """
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    GROUPS: gl.constexpr = (K + G - 1) // G
    STEP_K: gl.constexpr = 512 // BITS
    UNIT: gl.constexpr = min(STEP_K, G & -G)  # k of a step that surely share a scale
    GROUP_BYTES: gl.constexpr = 64 if SCALES == "fp32" else 32
    SAME: gl.constexpr = PARTS * STEP_K % G == 0 and K % STEP_K == 0  # way to the next in groups
    loaded = ()
    raw = ()
    for r in gl.static_range(R):
        for c in gl.static_range(FIRST, FIRST + C):
            if (c + 1) * PARTS <= STEPS:
                at = part + c * PARTS
                loaded = loaded + (
                    stream16(words[r], c * PARTS * 1024),
                    stream16(words[r], c * PARTS * 1024 + 512),
                )
            else:
                at = gl.minimum(part + c * PARTS, STEPS - 1)
                here = words[r] + (at - part).to(gl.int64) * 1024
                loaded = loaded + (stream16(here), stream16(here, 512))
            for unit in gl.static_range(STEP_K // UNIT):
                if (c + 1) * PARTS <= STEPS and SAME:
                    here = scales[r] + (part * STEP_K + unit * UNIT) // G * GROUP_BYTES
                    raw = raw + (_raw_scales(here, c * PARTS * STEP_K // G * GROUP_BYTES, SCALES),)
                else:
                    group = gl.minimum((at * STEP_K + unit * UNIT) // G, GROUPS - 1)
                    raw = raw + (_raw_scales(scales[r] + group * GROUP_BYTES, 0, SCALES),)
    return loaded, raw


@gluon.jit
def _raw_scales(address, OFFSET: gl.constexpr, SCALES: gl.constexpr):
    if SCALES == "fp32":
        raw = load8(address, OFFSET)
    else:
        raw = load4(address, OFFSET)
    return raw


@gluon.jit
def multiply_steps(
    acc, loaded, raw, sources, part, none, FIRST: gl.constexpr, C: gl.constexpr, G: gl.constexpr,
    BITS: gl.constexpr, K: gl.constexpr, R: gl.constexpr, NT: gl.constexpr, PARTS: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    """Acc with what C loaded steps of every tile add, x in BF16; steps are those of `load_steps`.

    sources: address of the first chunk of this lane's column at the warp's first step, for each
        block of tokens.
    """
    Q: gl.constexpr = 16 // BITS  # chunks of a lane in a step
    GROUP_Q: gl.constexpr = min(Q, (G & -G) // 32)  # chunks that surely share a scale
    sums = zeros(none, C * R * NT)
    for q in gl.static_range(Q):
        fragments = ()
        for c in gl.static_range(FIRST, FIRST + C):
            for nt in gl.static_range(NT):
                fragments = fragments + (_fragments(sources[nt], part, c, q, K, BITS, PARTS),)
        sums = _multiply_chunks(sums, loaded, fragments, q, C, BITS, R, NT)
        if (q + 1) % GROUP_Q == 0:
            total = ()
            for i in gl.static_range(R * NT):
                a = acc[i]
                for c in gl.static_range(C):
                    d = sums[c * (R * NT) + i]
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
                sums = zeros(none, C * R * NT)
    return acc


@gluon.jit
def zeros(none, COUNT: gl.constexpr):
    """Sums of so many products that begin with nothing."""
    sums = ()
    for _i in gl.static_range(COUNT):
        sums = sums + ((none, none, none, none),)
    return sums


@gluon.jit
def _fragments(
    source, part, c: gl.constexpr, q: gl.constexpr, K: gl.constexpr, BITS: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Four words of two k that a lane's q-th chunk of a step multiplies, its token's column."""
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    STEP_K: gl.constexpr = 512 // BITS
    if (c + 1) * PARTS <= STEPS and K % STEP_K == 0:
        x = load16(source, (c * PARTS * STEP_K + q * 32) * 2)
    else:
        step = part + c * PARTS
        k = gl.minimum(step, STEPS - 1) * STEP_K + q * 32
        if K % STEP_K != 0:  # past K: any numbers, the weights there are zero
            k = gl.where(k + 32 <= K, k, 0)
        x = words_where(step < STEPS, load16(source + (k - part * STEP_K).to(gl.int64) * 2))
    return x


@gluon.jit
def _multiply_chunks(
    sums, loaded, fragments, q: gl.constexpr, C: gl.constexpr, BITS: gl.constexpr,
    R: gl.constexpr, NT: gl.constexpr,
):  # fmt: skip
    """Sums of every step, tile and block of tokens with the q-th chunks of all lanes."""
    new = ()
    for c in gl.static_range(C):
        for r in gl.static_range(R):
            low = loaded[2 * (r * C + c)]
            high = loaded[2 * (r * C + c) + 1]
            for nt in gl.static_range(NT):
                d = sums[(c * R + r) * NT + nt]
                x = fragments[c * NT + nt]
                if BITS == 4:
                    l0, l1, l2, l3 = pairs(low[q], BITS)
                    h0, h1, h2, h3 = pairs(high[q], BITS)
                    d = mma(d, l0, h0, l1, h1, x[0], x[1])
                    d = mma(d, l2, h2, l3, h3, x[2], x[3])
                else:  # code = lower nibble + 16 * upper nibble
                    for i in gl.static_range(2):
                        l0, l1, l2, l3 = pairs(low[2 * q + i], BITS)
                        h0, h1, h2, h3 = pairs(high[2 * q + i], BITS)
                        d = mma(d, l0, h0, l1, h1, x[2 * i], times16(x[2 * i]))
                        d = mma(d, l2, h2, l3, h3, x[2 * i + 1], times16(x[2 * i + 1]))
                new = new + (d,)
    return new
