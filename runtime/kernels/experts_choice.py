"""Device functions: the likeliest experts of a token, found by every warp for itself.

Scores are compared as integers that have their order, so that a NaN is a number like others and
the experts are always some that exist. Of equal scores the lower number comes first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.access import load4_l2
from lowbit.runtime.kernels.mma import as_float, as_word, largest_signed, least

LOWEST = gl.constexpr(-(1 << 31))  # an expert that is none, or has been chosen


@gluon.jit
def likeliest(scores, lane, EXPERTS: gl.constexpr, CHOSEN: gl.constexpr):
    """Numbers of the CHOSEN likeliest experts, the likeliest first, and their scores.

    Both are the same in every lane.

    scores: address of the first of EXPERTS scores in FP32.
    """
    SLOTS: gl.constexpr = (EXPERTS + 31) // 32  # experts of a lane
    keys = ()
    for j in gl.static_range(SLOTS):
        number = lane + 32 * j
        at = scores + gl.minimum(number, EXPERTS - 1).to(gl.int64) * 4
        key = ordered(as_word(as_float(load4_l2(at)) + 0.0))  # of the zeros both are one
        if (j + 1) * 32 > EXPERTS:
            key = gl.where(number < EXPERTS, key, LOWEST)
        keys = keys + (key,)
    numbers = ()
    found = ()
    for _i in gl.static_range(CHOSEN):
        best = keys[0]  # type: ignore[misc]
        for j in gl.static_range(1, SLOTS):
            best = gl.maximum(best, keys[j])
        best = largest_signed(best)
        number = lane * 0 + (EXPERTS - 1)
        for j in gl.static_range(SLOTS - 1, -1, -1):
            number = gl.where(keys[j] == best, lane + 32 * j, number)
        number = least(number)
        rest = ()
        for j in gl.static_range(SLOTS):
            rest = rest + (gl.where(number == lane + 32 * j, LOWEST, keys[j]),)
        keys = rest
        numbers = numbers + (number,)
        found = found + (as_float(ordered(best)),)
    return numbers, found


@gluon.jit
def expert_of(slot, numbers, EXPERTS: gl.constexpr, CHOSEN: gl.constexpr):
    """Number of the expert in a slot; that of the shared one follows those of the others."""
    number = gl.where(slot == CHOSEN, EXPERTS, numbers[0])
    for i in gl.static_range(1, CHOSEN):
        number = gl.where(slot == i, numbers[i], number)
    return number


@gluon.jit
def ordered(word):
    """The bits of an FP32 as an integer that compares like it, and back."""
    return word ^ ((word >> 31) & 0x7FFFFFFF)


@gluon.jit
def shares(scores, CHOSEN: gl.constexpr):
    """Softmax over the scores of the chosen experts, of which the first is the largest."""
    parts = ()
    for i in gl.static_range(CHOSEN):
        parts = parts + (gl.exp(scores[i] - scores[0]),)
    total = parts[0]  # type: ignore[misc]
    for i in gl.static_range(1, CHOSEN):
        total += parts[i]
    out = ()
    for i in gl.static_range(CHOSEN):
        out = out + (parts[i] / total,)
    return out
