"""The choice is the best there is, by trying all, and by dense dynamic programming."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.convert.budget.knapsack import UNITS, Option, choose

LOSSES = st.one_of(st.just(0.0), st.floats(0, 1), st.floats(0, 1e-6), st.sampled_from([0.1, 0.2]))
OPTIONS = st.builds(Option, st.integers(0, 60), LOSSES)
SETS = st.lists(st.lists(OPTIONS, min_size=1, max_size=4), min_size=1, max_size=6)


def total(sets: Sequence[Sequence[Option]], picks: Sequence[int]) -> tuple[int, int]:
    """Size, and loss in units."""
    chosen = [options[pick] for options, pick in zip(sets, picks, strict=True)]
    return sum(o.size for o in chosen), sum(round(o.loss * UNITS) for o in chosen)


def brute_force(sets: Sequence[Sequence[Option]], limit: int) -> int | None:
    every = itertools.product(*(range(len(options)) for options in sets))
    losses = (loss for size, loss in (total(sets, picks) for picks in every) if size <= limit)
    return min(losses, default=None)


@given(sets=SETS, limit=st.integers(-5, 260))
def test_best_of_all(sets: list[list[Option]], limit: int) -> None:
    picks, best = choose(sets, limit), brute_force(sets, limit)
    if picks is None:
        assert best is None
    else:
        size, loss = total(sets, picks)
        assert size <= limit
        assert loss == best


def dense(sets: Sequence[Sequence[Option]], limit: int) -> int:
    """One cell for every size up to the limit."""
    best: list[int | None] = [0] + [None] * limit
    for options in sets:
        following: list[int | None] = [None] * (limit + 1)
        for used, loss in enumerate(best):
            for option in options:
                size = used + option.size
                if loss is not None and size <= limit:
                    here, new = following[size], loss + round(option.loss * UNITS)
                    following[size] = new if here is None else min(here, new)
        best = following
    return min(loss for loss in best if loss is not None)


@pytest.mark.parametrize("seed", range(3))
def test_best_of_many_sets(seed: int) -> None:
    rng = random.Random(seed)
    sets = []
    for _ in range(60):
        scale = 10 ** rng.uniform(-5, -3)
        sets.append([Option(16, 0.0), *(Option(rng.randint(4, 9), scale) for _ in range(3))])
        sets[-1][1:] = [Option(o.size, scale * 2.0 ** -(2 * o.size)) for o in sets[-1][1:]]
    least = sum(min(o.size for o in options) for options in sets)
    for limit in (least, least + 7, least + 100):
        picks = choose(sets, limit)
        assert picks is not None
        size, loss = total(sets, picks)
        assert size <= limit
        assert loss == dense(sets, limit)


def test_as_many_sets_as_large_models_have() -> None:
    rng = random.Random(0)
    sets = []
    for _ in range(300):
        weights, modules = 4096 * rng.choice([4096, 6144, 12288, 24576]), rng.randint(1, 3)
        scale = weights / 5e7 * 10 ** rng.gauss(-4, 0.5)
        options = [Option(2 * weights, 0.0)]
        for bits, damage in ((4, 1.0), (8, 1 / 250)):
            for group, factor in ((32, 0.7), (64, 0.85), (128, 1.0)):
                size = weights * bits // 8 + 2 * weights // group + 16 * modules
                options.append(Option(size, scale * damage * factor * rng.uniform(0.95, 1.05)))
        sets.append(options)
    stored = sum(options[0].size for options in sets)
    limit = stored * 5 // 16
    picks = choose(sets, limit)
    assert picks is not None
    size, loss = total(sets, picks)
    assert limit - size < 1e-4 * limit
    assert loss <= best_of_one_price(sets, limit)


def best_of_one_price(sets: Sequence[Sequence[Option]], limit: int) -> int:
    """The least loss where every set takes its best at one price of a byte, over many prices."""
    found = []
    for exponent in range(400):
        price = 10 ** (-16 + exponent / 50)
        picks = [
            min(range(len(options)), key=lambda n: options[n].loss + price * options[n].size)
            for options in sets
        ]
        size, loss = total(sets, picks)
        if size <= limit:
            found.append(loss)
    return min(found)


def test_out_of_reach() -> None:
    assert choose([[Option(3, 0.0)], [Option(4, 0.5), Option(5, 0.0)]], 6) is None


def test_nothing_to_choose() -> None:
    assert choose([[Option(3, 0.1)], [Option(4, 0.2)]], 7) == [0, 0]


def test_smaller_of_equals() -> None:
    assert choose([[Option(5, 0.25), Option(4, 0.25)]], 9) == [1]
