"""Device functions of the GEMV: steps of tiles, loaded as they are stored."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.memory import load4, load8, stream16


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
def zeros(none, COUNT: gl.constexpr):
    """Sums of so many products that begin with nothing."""
    sums = ()
    for _i in gl.static_range(COUNT):
        sums = sums + ((none, none, none, none),)
    return sums
