"""Device functions: the likeliest experts of a token, found by a warp.

Scores are compared as integers that have their order, so that a NaN is a number like others and
the experts are always some that exist. Of equal scores the lower number comes first. Every lane
sorts its own experts; then the largest of the lanes' first ones is taken, again and again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.memory import load4_l2
from lowbit.runtime.kernels.ptx.mma import across, as_float, as_word, largest_signed, least

LOWEST = gl.constexpr(-(1 << 31))  # an expert that is none, or has been chosen


@gluon.jit
def scores_of(scores_ptr, token, zero, CHOICE: gl.constexpr):
    """Address of the first score of a token, in FP32; that of the shared expert is the last."""
    scores = scores_ptr.to(gl.int64, bitcast=True) + zero
    return scores + token.to(gl.int64) * (4 * (CHOICE.EXPERTS + CHOICE.SLOTS - CHOICE.CHOSEN))


@gluon.jit
def likeliest(scores, lane, CHOICE: gl.constexpr):
    """Numbers of the likeliest experts, the likeliest first, and their scores, in every lane.

    scores: see `scores_of`.
    """
    EXPERTS: gl.constexpr = CHOICE.EXPERTS
    CHOSEN: gl.constexpr = CHOICE.CHOSEN
    SLOTS: gl.constexpr = (EXPERTS + 31) // 32  # experts of a lane
    keys = ()
    numbers = ()
    for j in gl.static_range(SLOTS):
        number = gl.minimum(lane + 32 * j, EXPERTS - 1)
        score = as_float(load4_l2(scores + number.to(gl.int64) * 4))
        key = ordered(as_word(score + 0.0))  # of the zeros both are one
        if (j + 1) * 32 > EXPERTS:
            key = gl.where(lane + 32 * j < EXPERTS, key, LOWEST)
        keys = keys + (key,)
        numbers = numbers + (number,)
    for phase in gl.static_range(SLOTS):
        keys, numbers = _neighbours_sorted(keys, numbers, phase % 2)
    chosen = ()
    found = ()
    for i in gl.static_range(CHOSEN):
        best = largest_signed(keys[0])  # type: ignore[misc]
        first = numbers[0]  # type: ignore[misc]
        number = least(gl.where(keys[0] == best, first, EXPERTS))  # type: ignore[misc]
        chosen = chosen + (number,)
        found = found + (as_float(ordered(best)),)
        keys, numbers = _without_first(keys, numbers, first == number, CHOSEN - 1 - i, EXPERTS)
    return chosen, found


@gluon.jit
def _neighbours_sorted(keys, numbers, FIRST: gl.constexpr):
    """Pairs of neighbours from FIRST on, each with the larger key first; equal ones stay."""
    new_keys = keys[:FIRST]
    new_numbers = numbers[:FIRST]
    for j in gl.static_range(FIRST, len(keys) - 1, 2):
        swapped = keys[j + 1] > keys[j]
        new_keys = new_keys + (
            gl.maximum(keys[j], keys[j + 1]),
            gl.minimum(keys[j], keys[j + 1]),
        )
        new_numbers = new_numbers + (
            gl.where(swapped, numbers[j + 1], numbers[j]),
            gl.where(swapped, numbers[j], numbers[j + 1]),
        )
    done: gl.constexpr = len(new_keys)
    return new_keys + keys[done:], new_numbers + numbers[done:]


@gluon.jit
def _without_first(keys, numbers, wanted, MOST: gl.constexpr, EXPERTS: gl.constexpr):
    """At most MOST keys of a lane, without the first where that is wanted."""
    new_keys = ()
    new_numbers = ()
    for j in gl.static_range(len(keys) if len(keys) < MOST else MOST):
        if j + 1 < len(keys):
            key = keys[j + 1]
            number = numbers[j + 1]
        else:
            key = LOWEST
            number = EXPERTS - 1
        new_keys = new_keys + (gl.where(wanted, key, keys[j]),)
        new_numbers = new_numbers + (gl.where(wanted, number, numbers[j]),)
    return new_keys, new_numbers


@gluon.jit
def expert_of(slot, numbers, CHOICE: gl.constexpr):
    """Number of the expert in a slot; that of the shared one follows those of the others."""
    number = gl.where(slot == CHOICE.CHOSEN, CHOICE.EXPERTS, numbers[0])
    for i in gl.static_range(1, len(numbers)):
        number = gl.where(slot == i, numbers[i], number)
    return number


@gluon.jit
def ordered(word):
    """The bits of an FP32 as an integer that compares like it, and back."""
    return word ^ ((word >> 31) & 0x7FFFFFFF)


@gluon.jit
def shares(scores, found, lane, CHOICE: gl.constexpr):
    """Softmax over the scores that were found, the largest first; the sigmoid of a shared one's.

    Without CHOICE.NORMED the softmax is over the scores of all experts, in an order of their own
    whatever the step. scores: see `scores_of`.
    """
    CHOSEN: gl.constexpr = CHOICE.CHOSEN
    parts = ()
    for i in gl.static_range(CHOSEN):
        parts = parts + (gl.exp(found[i] - found[0]),)
    if CHOICE.NORMED:
        total = parts[0]  # type: ignore[misc]
        for i in gl.static_range(1, CHOSEN):
            total += parts[i]
    else:
        total = _sum_of_all(scores, found[0], lane, CHOICE.EXPERTS)
    out = ()
    for i in gl.static_range(CHOSEN):
        out = out + (parts[i] / total,)
    if CHOICE.SLOTS > CHOSEN:
        gate = as_float(load4_l2(scores + 4 * CHOICE.EXPERTS))
        out = out + (1.0 / (1.0 + gl.exp(-gate)),)
    return out


@gluon.jit
def _sum_of_all(scores, most, lane, EXPERTS: gl.constexpr):
    """Sum of exp(score - most) over all experts, in every lane."""
    total = 0.0 * lane.to(gl.float32)
    for j in gl.static_range((EXPERTS + 31) // 32):
        number = gl.minimum(lane + 32 * j, EXPERTS - 1)
        part = gl.exp(as_float(load4_l2(scores + number.to(gl.int64) * 4)) - most)
        total += gl.where(lane + 32 * j < EXPERTS, part, 0.0)
    total += across(total, 16)
    total += across(total, 8)
    total += across(total, 4)
    total += across(total, 2)
    total += across(total, 1)
    return total
