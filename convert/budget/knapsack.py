"""Exact solution of the multiple-choice knapsack: one option a set, least loss under a size limit.

Dynamic programming over the sets. A state is a pair of size and loss that no other pair beats in
both. A state is dropped when its Lagrangian bound, loss + lambda (size - limit) plus the least
reduced loss of the remaining sets, exceeds a known solution; with lambda from the relaxed problem
few states survive (D. Pisinger, A minimal algorithm for the multiple-choice knapsack problem,
1995). Losses are rounded to integers first, so that sums are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

UNITS = 1e12  # steps of a loss of 1; sensitivities are far coarser
NARROW = 512  # states a set in the first search, which only finds a good solution

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Option:
    """One choice for a set."""

    size: int  # in any integer unit
    loss: float  # at least 0 and finite


@dataclass(frozen=True, slots=True)
class _Set:
    """Options of a set that no other option beats in both size and loss, by rising size."""

    indices: Ints  # positions of these options in the set as given
    least: int  # smallest size
    sizes: Ints  # sizes less the smallest, rising from 0
    losses: Ints  # losses in UNITS, falling


def choose(sets: Sequence[Sequence[Option]], limit: int) -> list[int] | None:
    """Choose one option of each set: least sum of losses with a sum of sizes <= limit.

    Returns:
        Index of the option for each set; None where even the smallest options do not fit.
    """
    pruned = [_undominated(options) for options in sets]
    room = limit - sum(one.least for one in pruned)
    if room < 0:
        return None
    price, start = _relax(pruned, room)
    losses = [one.losses + price * one.sizes for one in pruned]
    # Sets with a clear best option first: their other options soon exceed the bound.
    order = sorted(range(len(pruned)), key=lambda number: -_lead(losses[number]))
    best = _search(pruned, order, price, room, start, NARROW)
    best = _search(pruned, order, price, room, best, None)
    return [int(one.indices[pick]) for one, pick in zip(pruned, best, strict=True)]


def _undominated(options: Sequence[Option]) -> _Set:
    kept: list[int] = []
    for number in sorted(range(len(options)), key=lambda n: (options[n].size, options[n].loss)):
        if not kept or _units(options[number]) < _units(options[kept[-1]]):
            kept.append(number)
    least = options[kept[0]].size
    return _Set(
        np.array(kept, dtype=np.int64),
        least,
        np.array([options[n].size - least for n in kept], dtype=np.int64),
        np.array([_units(options[n]) for n in kept], dtype=np.int64),
    )


def _units(option: Option) -> int:
    return round(option.loss * UNITS)


def _lead(reduced: NDArray[np.float64]) -> float:
    """Reduced loss of a set's second-best option less that of its best."""
    if len(reduced) == 1:
        return float("inf")
    first, second = np.partition(reduced, 1)[:2]
    return float(second - first)


def _relax(sets: Sequence[_Set], room: int) -> tuple[float, list[int]]:
    """Price of a unit of size in the relaxed problem, and a solution that fits.

    Takes steps along the lower convex hulls, steepest first, until one does not fit.
    """
    picks = [0] * len(sets)
    steps = []
    for number, one in enumerate(sets):
        for a, b in pairwise(_hull(one)):
            gain = float(one.losses[a] - one.losses[b]) / float(one.sizes[b] - one.sizes[a])
            steps.append((gain, number, b))
    price = 0.0
    for gain, number, b in sorted(steps, key=lambda step: -step[0]):
        growth = int(sets[number].sizes[b] - sets[number].sizes[picks[number]])
        if growth <= room:
            picks[number] = b
            room -= growth
        else:
            price = price or gain
    return price, picks


def _hull(one: _Set) -> list[int]:
    hull: list[int] = []
    for b in range(len(one.sizes)):
        while len(hull) > 1 and _above(one, hull[-2], hull[-1], b):
            hull.pop()
        hull.append(b)
    return hull


def _above(one: _Set, a: int, middle: int, b: int) -> bool:
    left = int(one.losses[a] - one.losses[middle]) * int(one.sizes[b] - one.sizes[middle])
    right = int(one.losses[middle] - one.losses[b]) * int(one.sizes[middle] - one.sizes[a])
    return left <= right


def _search(
    sets: Sequence[_Set],
    order: Sequence[int],
    price: float,
    room: int,
    start: list[int],
    width: int | None,
) -> list[int]:
    """Best solution, or `start` where none is better.

    Args:
        width: number of states kept a set, those of the least bound; None keeps all: exact.
    """
    goal = sum(int(one.losses[pick]) for one, pick in zip(sets, start, strict=True))
    least = [float((sets[n].losses + price * sets[n].sizes).min()) for n in order]
    # Rounding of the bound must never cost the optimum.
    margin = 1 + 1e-12 * (goal + price * room)
    size, loss = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    trail: list[tuple[Ints, Ints]] = []
    for position, number in enumerate(order):
        one = sets[number]
        wide_size = (size[:, None] + one.sizes).ravel()
        wide_loss = (loss[:, None] + one.losses).ravel()
        bound = wide_loss + price * (wide_size - room) + sum(least[position + 1 :])
        chosen = np.flatnonzero((bound <= goal + margin) & (wide_size <= room))
        chosen = chosen[np.lexsort((wide_loss[chosen], wide_size[chosen]))]
        lowest = np.minimum.accumulate(wide_loss[chosen])
        better = np.ones(len(chosen), dtype=bool)
        better[1:] = wide_loss[chosen][1:] < lowest[:-1]
        chosen = chosen[better]
        if width is not None and len(chosen) > width:
            chosen = np.sort(chosen[np.argsort(bound[chosen], kind="stable")[:width]])
        if not len(chosen):
            return start
        size, loss = wide_size[chosen], wide_loss[chosen]
        trail.append((chosen // len(one.sizes), chosen % len(one.sizes)))
    state = int(np.argmin(loss))
    if int(loss[state]) >= goal:
        return start
    picks = [0] * len(sets)
    for number, (parents, options) in zip(reversed(order), reversed(trail), strict=True):
        picks[number] = int(options[state])
        state = int(parents[state])
    return picks
