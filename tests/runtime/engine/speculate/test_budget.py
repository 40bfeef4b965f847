"""The bound on what drafts may lose, in a simulated clock that counts plain steps."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from lowbit.runtime.engine.speculate.budget import (
    BURST,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST_WON,
    SHARE,
    UNLIMITED,
    Budget,
    affordable,
    begin_request,
    begin_trial,
    end_trial,
    plan_drafts,
    spend,
    wait,
)
from lowbit.runtime.engine.speculate.drafting import MTP_GUESSES
from lowbit.runtime.engine.speculate.proposals import Cost, PlacedPace, Plan

ANSWER = 256  # tokens
# Steps that rounds of 1 to 7 drafts take; BENCHMARKS.md has the first two up to 4.
COSTS = {
    "9B": (1.25, 1.50, 1.56, 1.92, 2.20, 2.40, 2.60),
    "0.8B": (1.50, 1.99, 2.11, 2.76, 3.00, 3.30, 3.60),
    "flat": (1.25,) * 7,
    "dear": (1.80, 2.20, 2.50, 3.00, 3.50, 4.00, 4.50),
}
Chance = Callable[[int], float]  # that a draft is right behind right ones, by the tokens so far


def cost_of(name: str) -> Cost:
    return lambda drafts: COSTS[name][drafts - 1]


@dataclass
class Text:
    """A simulated engine with one sequence.

    Attributes:
        cost: of a round by drafts; `change` more around a stretch of rounds.
        error: true time of a round against the cost that the policy knows.
        budget: see `Budget`; it and the pace last from one request to the next.
        time: plain steps so far.
        rounds: so far.
    """

    cost: Cost
    change: float = 0.0
    error: float = 1.0
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    pace: PlacedPace | None = None
    time: float = 0.0
    rounds: int = 0

    def answer(self, chance: Chance, tokens: int, fixed: int = 0) -> float:
        """Tokens per step of one request; `fixed` drafts in every step instead of the policy."""
        draw, before, made, in_rounds = random.Random(self.seed), self.time, 0, False
        self.budget = begin_request(self.budget)
        pace = self.pace.successor() if self.pace else PlacedPace(MTP_GUESSES)
        self.pace = pace
        while made < tokens:
            change = 0.0 if in_rounds else self.change
            plan = Plan(fixed)
            if not fixed:
                plan = plan_drafts(self.budget, [pace.chances], len(COSTS["9B"]), self.cost, change)
            if plan.drafts == 0:
                taken, gained = 1 + (self.change / 2 if in_rounds else 0.0), 1
                self.budget = spend(self.budget, taken, 1) if in_rounds else wait(self.budget)
            else:
                right = 0
                while right < plan.drafts and draw.random() < chance(made):
                    right += 1
                taken = self.cost(plan.drafts) * self.error + change / 2
                gained = 1 + right
                pace.note(plan.drafts, right)
                self.budget = end_trial(begin_trial(self.budget), right > 0)
                self.budget = spend(self.budget, taken, gained)
                self.rounds += 1
            in_rounds = plan.drafts > 0
            self.time += taken
            made += gained
        return made / (self.time - before)


def mean_speed(name: str, chance: float, change: float, fixed: int = 0) -> float:
    speeds = [
        Text(cost_of(name), change, seed=seed).answer(lambda _: chance, ANSWER, fixed)
        for seed in range(60)
    ]
    return len(speeds) / sum(1 / speed for speed in speeds)


@pytest.mark.parametrize("change", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", COSTS)
def test_wrong_drafts_cost_two_percent_at_most(name: str, change: float) -> None:
    text = Text(cost_of(name), change)
    first = text.answer(lambda _: 0.0, ANSWER)
    assert 0.98 <= first < 1.0
    assert text.rounds > 0
    later = [text.answer(lambda _: 0.0, ANSWER) for _ in range(8)]
    assert min(later) >= 0.98
    assert sum(later) / len(later) >= 0.99  # who follows does not pay for the first tries again


@pytest.mark.parametrize("chance", [0.1, 0.3, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("name", COSTS)
def test_no_text_is_slower_whatever_luck_it_has(name: str, chance: float) -> None:
    for change in (0.0, 0.5):
        for seed in range(25):
            text = Text(cost_of(name), change, seed=seed)
            assert text.answer(lambda _: chance, ANSWER) >= 0.98


@pytest.mark.parametrize("name", ["9B", "0.8B", "flat"])
def test_right_drafts_are_as_fast_as_always_drafting(name: str) -> None:
    for chance in (0.9, 0.95):
        always = max(mean_speed(name, chance, 0.5, fixed) for fixed in (1, 2, 3, 4))
        assert mean_speed(name, chance, 0.5) >= 0.97 * always


def test_drafts_that_pay_little_are_not_given_up() -> None:
    always = max(mean_speed("9B", 0.6, 0.5, fixed) for fixed in (1, 2, 3, 4))
    assert always > 1.3
    assert mean_speed("9B", 0.6, 0.5) > 0.95 * always


@pytest.mark.parametrize("name", COSTS)
def test_a_text_that_changes_keeps_the_bound_and_is_noticed(name: str) -> None:
    half = 1024
    for seed in range(10):
        better = Text(cost_of(name), 0.5, seed=seed)
        assert better.answer(lambda made: 0.0 if made < half else 0.95, 2 * half) > 1.1
        worse = Text(cost_of(name), 0.5, seed=seed)
        assert worse.answer(lambda made: 0.95 if made < half else 0.0, 2 * half) > 1.1


@pytest.mark.parametrize("error", [0.8, 1.3, 2.0])
def test_a_wrong_estimate_adds_one_round_to_the_bound(error: float) -> None:
    for name in COSTS:
        text = Text(cost_of(name), error=error)
        speed = text.answer(lambda _: 0.0, ANSWER)
        overrun = max(0.0, error - 1) * max(COSTS[name])
        assert ANSWER / speed <= (ANSWER + BURST + overrun) / (1 - SHARE) + 1e-9


def test_what_one_request_won_the_next_cannot_lose() -> None:
    text = Text(cost_of("flat"))
    text.answer(lambda _: 1.0, ANSWER)
    assert text.budget.level > BURST
    assert text.answer(lambda _: 0.0, ANSWER) >= 0.98


def test_the_level_has_its_limits() -> None:
    assert spend(Budget(), 1.5, 8).level == BURST + 6.5
    assert spend(Budget(level=11.0), 1.5, 8).level == MOST_WON
    assert spend(Budget(level=1.0), 2.0, 1).level == pytest.approx(2.0 * SHARE)
    assert wait(Budget(level=1.0)).level == pytest.approx(1.0 + SHARE)
    assert wait(Budget(level=BURST)).level == BURST
    assert wait(Budget(level=5.0)).level == 5.0  # won, and not taken away
    assert begin_request(Budget(level=5.0)).level == BURST
    assert begin_request(Budget(level=-1.0)).level == -1.0


def test_no_more_drafts_than_the_level_covers() -> None:
    cost: Cost = lambda drafts: 1 + 0.5 * drafts  # noqa: E731
    assert affordable(Budget(level=1.6), 7, cost) == 3
    assert affordable(Budget(level=1.6), 2, cost) == 2
    assert affordable(Budget(level=1.6), 7, cost, change=1.0) == 1
    assert affordable(Budget(level=0.4), 7, cost) == 0
    assert affordable(Budget(level=9.0), 0, cost) == 0
    assert affordable(UNLIMITED, 7, cost) == 7


def test_trials_back_off_and_come_back() -> None:
    budget, pauses = Budget(), []
    for _ in range(7):
        budget = end_trial(begin_trial(budget), right=False)
        pauses.append(budget.pause)
        assert not budget.due
        for _ in range(budget.pause):
            budget = wait(budget)
        assert budget.due
    assert pauses == [FIRST_PAUSE, 16, 32, 64, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    assert begin_request(budget).pause == FIRST_PAUSE
    assert not begin_trial(budget).due  # until its result is known
    assert end_trial(begin_trial(budget), right=True).due


def test_a_trial_is_of_one_draft_and_waits_for_its_turn() -> None:
    cost = cost_of("9B")
    hopeless = [[0.01] * 7]
    assert plan_drafts(Budget(), hopeless, 7, cost) == Plan(1)
    assert plan_drafts(Budget(pause=8, waited=7), hopeless, 7, cost) == Plan()
    assert plan_drafts(Budget(pause=8, waited=8), hopeless, 7, cost) == Plan(1)
    assert plan_drafts(Budget(level=0.1), hopeless, 7, cost) == Plan()
    assert plan_drafts(Budget(), hopeless, 0, cost) == Plan()
    good = plan_drafts(Budget(pause=8), [[0.95] * 7], 7, cost)  # which needs no trial
    assert good.drafts == 7
    assert good.gain > 2
    assert plan_drafts(Budget(level=0.3, pause=8), [[0.95] * 7], 7, cost).drafts == 1


def test_drafts_without_a_limit_stay_so() -> None:
    budget = spend(UNLIMITED, 100.0, 1)
    assert not budget.limited
    assert not wait(budget).limited
    assert not begin_request(replace(budget, pause=99)).limited
    assert begin_request(replace(budget, pause=99)).pause == FIRST_PAUSE
