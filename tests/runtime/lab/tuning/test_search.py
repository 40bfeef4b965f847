"""The search for launches, on a machine whose times are a formula."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from lowbit.runtime.kernels.launch.card import H200
from lowbit.runtime.kernels.launch.linear import GemvLaunch, gemv_launch
from lowbit.runtime.lab.tuning.search import LEAST_GAIN, Launches, Search, Trial
from lowbit.runtime.lab.tuning.short_model import Linear

EXAMPLE: Any = None
QKV = Linear((4, 448, 40, False), 5120, 4, 40.0, 100, EXAMPLE)
DOWN = Linear((4, 320, 136, False), 17408, 4, 40.0, 300, EXAMPLE)
LINEARS = [DOWN, QKV]
GATE_UP = Linear((4, 2176, 40, True), 5120, 4, 40.0, 400, EXAMPLE)
Cost = Callable[[Linear, int, GemvLaunch], float]


def launch_of(linear: Linear, tokens: int, launches: Launches = {}) -> GemvLaunch:  # noqa: B006
    bits, tiles, steps, paired = linear.size
    return gemv_launch(bits, tiles, steps, tokens, paired, launches.get(linear.size, ()))


@dataclass
class Formula:
    """A step takes 100 us, and what each linear takes beside that."""

    cost: Cost
    uncompiled: Callable[[Trial], bool] = lambda trial: False
    taken: int = 10**9
    last: int = 32
    asked: list[Trial] = field(default_factory=list)
    timed: int = 0
    linears: list[Linear] = field(default_factory=lambda: LINEARS)
    seen: list[tuple[int, Launches]] = field(default_factory=list)

    def compiled(self, trials: Sequence[Trial], launches: Launches) -> set[Trial]:
        self.asked += trials
        return {trial for trial in trials if not self.uncompiled(trial)}

    def step_us(self, tokens: int, launches: Launches) -> float:
        self.timed += 1
        self.seen.append((tokens, launches))
        return 100 + sum(
            self.cost(it, tokens, launch_of(it, tokens, launches)) for it in self.linears
        )

    def takes(self, linear: Linear, tokens: int, one: GemvLaunch) -> bool:
        return tokens <= self.last

    def is_over(self) -> bool:
        return self.timed >= self.taken


def prefer(wanted: dict[str, Any]) -> Cost:
    """Each field of a launch that is as wanted saves 5 us of 40."""

    def cost(linear: Linear, tokens: int, launch: GemvLaunch) -> float:
        return 40.0 - 5 * sum(bool(getattr(launch, it) == wanted[it]) for it in wanted)

    return cost


def test_the_fastest_launch_of_each_linear_is_found() -> None:
    wanted = {"early": True, "registers": 96, "shared": 32, "warps": 4}
    bench = Formula(prefer(wanted))
    search = Search(bench, H200)
    choices = {each.linear: each for each in search.run(LINEARS, 1)}
    assert choices.keys() == {DOWN, QKV}
    found = choices[QKV]
    assert {name: getattr(found.after, name) for name in wanted} == wanted
    assert found.before == launch_of(QKV, 1)
    assert launch_of(QKV, 1, search.launches()) == found.after
    matches = sum(getattr(found.before, name) == value for name, value in wanted.items())
    assert found.before_us - found.after_us == 5 * (len(wanted) - matches)
    assert found.call_us == (found.before_us - found.after_us) / 4
    # x of 17,408 elements takes more shared memory than a launch may ask for.
    assert choices[DOWN].after.shared == 0
    assert choices[DOWN].after.registers == 96
    assert found.tried < 60


def test_no_launch_is_tried_twice() -> None:
    bench = Formula(prefer({"early": True}))
    Search(bench, H200).run(LINEARS, 1)
    assert len(set(bench.asked)) == len(bench.asked)


def test_the_likeliest_of_all_linears_are_compiled_first() -> None:
    bench = Formula(prefer({}))
    Search(bench, H200).run(LINEARS, 1)
    assert [trial.linear for trial in bench.asked[:4]] == [DOWN, QKV, DOWN, QKV]
    assert [trial.launch for trial in bench.asked[:2]] == [launch_of(it, 1) for it in LINEARS]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_gain_within_the_noise_changes_nothing(factor: float) -> None:
    gain = LEAST_GAIN * 180 * factor

    def cost(linear: Linear, tokens: int, launch: GemvLaunch) -> float:
        return 40 - gain * (linear is QKV and launch.registers == 80)

    search = Search(Formula(cost), H200)
    by_linear = {each.linear: each for each in search.run(LINEARS, 1)}
    assert (by_linear[QKV].after == by_linear[QKV].before) is (factor < 1)
    assert by_linear[DOWN].after == by_linear[DOWN].before
    assert search.launches()[DOWN.size] == ((1, launch_of(DOWN, 1)),)


def test_launches_of_several_tokens_have_the_parts_of_one() -> None:
    search = Search(Formula(prefer({"warps": 16, "tiles": 2})), H200)
    [one] = [each.after for each in search.run(LINEARS, 1) if each.linear is QKV]
    for tokens in (2, 4, 8, 16, 32):
        for each in search.run(LINEARS, tokens):
            alone = launch_of(each.linear, 1, search.launches())
            assert each.after.parts == alone.parts
            assert launch_of(each.linear, tokens, search.launches()) == each.after
        assert launch_of(QKV, 1, search.launches()) == one


def test_linears_that_take_another_kernel_are_left_out() -> None:
    bench = Formula(prefer({"early": False}), last=8)
    search = Search(bench, H200)
    search.run(LINEARS, 1)
    before = search.launches()
    assert search.run(LINEARS, 16) == []
    assert search.launches() == before
    assert len(search.run(LINEARS, 8)) == 2


def test_a_lone_token_leaves_many_their_kernel() -> None:
    """Parts of K that are too long for it are not tried, however fast they would be."""

    class Hopper(Formula):
        def takes(self, linear: Linear, tokens: int, one: GemvLaunch) -> bool:
            return tokens < 16 or one.parts < 4

    def cost(linear: Linear, tokens: int, launch: GemvLaunch) -> float:
        return 10.0 * launch.parts

    assert launch_of(GATE_UP, 1).parts == 4
    for bench, parts in ((Hopper(cost), 4), (Formula(cost), 2)):
        bench.linears = [GATE_UP]
        [found] = Search(bench, H200).run([GATE_UP], 1)
        assert found.after.parts == parts


def test_when_the_time_is_over_what_was_tried_still_counts() -> None:
    wanted = {"early": True, "warps": 4}
    bench = Formula(prefer(wanted), taken=30)
    choices = Search(bench, H200).run(LINEARS, 1)
    assert [each.linear for each in choices] == [DOWN, QKV]
    assert choices[0].after_us < choices[0].before_us
    assert bench.timed <= 30 + 2 * 4 * 3
    assert Search(Formula(prefer(wanted), taken=0), H200).run(LINEARS, 1) == []


def test_what_does_not_compile_is_not_chosen() -> None:
    bench = Formula(prefer({"warps": 4}), uncompiled=lambda trial: trial.launch.warps == 4)
    for each in Search(bench, H200).run(LINEARS, 1):
        assert each.after.warps == 8


def test_a_launch_that_the_card_has_no_room_for_is_not_chosen() -> None:
    def cost(linear: Linear, tokens: int, launch: GemvLaunch) -> float:
        return float("inf") if launch.early else 40.0

    assert launch_of(QKV, 1).early
    (choice,) = Search(Formula(cost, linears=[QKV]), H200).run([QKV], 1)
    assert not choice.after.early


def test_others_keep_their_choice_while_one_is_tried() -> None:
    bench = Formula(prefer({"early": True, "registers": 80}))
    search = Search(bench, H200)
    search.run(LINEARS, 1)
    best = launch_of(DOWN, 1, search.launches())
    beside = [
        launches
        for _, launches in bench.seen
        if DOWN.size in launches and launch_of(QKV, 1, launches) != launch_of(QKV, 1)
    ]
    assert len(beside) > 24, "more than the last comparisons"
    early = [launch_of(DOWN, 1, launches).early for launches in beside]
    assert early.count(True) > len(early) / 2
    assert best.early
