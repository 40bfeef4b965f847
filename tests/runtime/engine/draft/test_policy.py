"""Numbers of drafts: what they lose and win by a simulated clock that counts plain steps."""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

import pytest

from lowbit.runtime.engine.draft.mtp import MTP_GUESSES
from lowbit.runtime.engine.draft.policy import (
    BURST,
    FIRST_PAUSE,
    FORGET_STEPS,
    FRESH,
    LONGEST_PAUSE,
    MARGIN,
    MOST_CREDIT,
    SHARE,
    AcceptanceRates,
    Kind,
    Plan,
    Policy,
    Stake,
    StepCosts,
    new_costs,
)
from lowbit.runtime.engine.graphs import width_for
from tests.lanes import in_commands

ANSWER = 256  # tokens
STEP = 0.002  # seconds
# Plain steps that rounds of 1 to 7 drafts take; BENCHMARKS.md has the first two up to 4.
COSTS = {
    "9B": (1.25, 1.50, 1.56, 1.92, 2.20, 2.40, 2.60),
    "0.8B": (1.50, 1.99, 2.11, 2.76, 3.00, 3.30, 3.60),
    "flat": (1.25,) * 7,
    "dear": (1.80, 2.20, 2.50, 3.00, 3.50, 4.00, 4.50),
}
MORE = 0.12  # plain steps that each draft beyond seven adds
TOKEN = 0.08  # of a plain step, that each further sequence adds to one
KINDS: tuple[Kind, ...] = get_args(Kind)
Chance = Callable[[int, int], float]  # that a draft is right: of a sequence, at a place of its text


@dataclass
class Text:
    """An engine with some sequences and a head, on a clock.

    Attributes:
        name: of the costs.
        change: steps that a stretch of rounds takes beyond them.
        sequences: decoded together.
        ahead: a round is sent before the one before it is read, as on a GPU.
        seed: of the texts.
        late: a step that many times too slow, now and then.
        held: first rounds that all are 20 times too slow.
        credit: of the policy; without a limit it measures nothing.
    """

    name: str
    change: float = 0.5
    sequences: int = 1
    ahead: bool = True
    seed: int = 0
    late: float = 1.0
    held: int = 0
    credit: float = BURST
    policy: Policy = field(init=False)
    time: float = 0.0
    rounds: int = 0
    _texts: int = 0
    _idle: float = 0.0
    _in_rounds: bool = False
    _at: list[int] = field(default_factory=list)  # tokens, by sequence
    _rates: list[AcceptanceRates] = field(default_factory=list)
    _draws: list[list[float]] = field(default_factory=list)  # by sequence and place
    _sent: deque[tuple[Stake, int, list[int], float]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        width = width_for if self.ahead else None
        measured, device = self.credit < math.inf, "cuda" if self.ahead else "cpu"
        self.policy = Policy(new_costs(device, measured, width), self.credit)
        self._rates = [AcceptanceRates(MTP_GUESSES)]

    def cost(self, drafts: int) -> float:
        """Plain steps of a round."""
        costs, count = COSTS[self.name], self.sequences
        if count == 1:
            return costs[drafts - 1]
        width = width_for if self.ahead else (lambda tokens: tokens)
        beyond, plain = width(count * (1 + drafts)) - count, 1 + TOKEN * (width(count) - 1)
        return 1 + (costs[min(beyond, 7) - 1] - 1 + MORE * max(0, beyond - 7)) / plain

    def answer(self, chance: Chance, tokens: int, fixed: int = 0) -> float:
        """Tokens of a sequence per plain step; with `fixed` drafts in place of the policy's."""
        self._texts, before, policy = self._texts + 1, self.time, self.policy
        self._at, self._rates = (
            [0] * self.sequences,
            [self._rates[0].inherit() for _ in range(self.sequences)],
        )
        draw = random.Random(f"{self.seed} {self._texts}")
        places = range(2 * tokens * self.sequences)
        self._draws = [[draw.random() for _ in places] for _ in range(self.sequences)]
        policy.begin_request()
        while sum(self._at) < tokens * self.sequences:
            drafts = fixed or self._plan()
            if self._sent and (drafts == 0 or drafts != self._sent[0][1]):
                self._idle = 0.15  # steps: the device waits for the host
                self._read()
                drafts = fixed or self._plan()
            if drafts == 0:
                policy.in_rounds = False
                self._pass(0, 1 + self.change / 2 * self._in_rounds, [0] * self.sequences)
                continue
            count = self.sequences * (1 + drafts)
            stake = policy.send("made", self.sequences, count, self._idle == 0.0)
            rights = [self._right(chance, each, drafts) for each in range(self.sequences)]
            taken = self.cost(drafts) + self.change / 2 * (not self._in_rounds)
            self._sent.append((stake, drafts, rights, self._pass(drafts, taken, rights)))
            if not self.ahead or len(self._sent) > 1:
                self._read()
        while self._sent:
            self._read()
        return sum(self._at) / self.sequences / (self.time - before)

    def _plan(self) -> int:
        rates, policy = [each.rates for each in self._rates], self.policy
        most = min(7, 16 // self.sequences - 1)
        most = policy.affordable("made", self.sequences, most)
        return policy.plan(policy.costs.cost("made", self.sequences), rates, most, True).drafts

    def _pass(self, drafts: int, taken: float, rights: list[int]) -> float:
        """Let time pass; the seconds that a clock shows."""
        taken, self._idle = taken + self._idle, 0.0
        self.time += taken
        self._in_rounds, self.rounds = drafts > 0, self.rounds + (drafts > 0)
        self._at = [at + 1 + right for at, right in zip(self._at, rights, strict=True)]
        held = self.late if (self.rounds + self._at[0]) % 40 == 0 else 1.0
        if drafts and self.rounds <= self.held:
            held = 20.0
        plain = 1 + TOKEN * (self.sequences - 1)
        if drafts == 0:
            self.policy.read_plain(self.sequences, taken * held * STEP * plain)
        return taken * held * STEP * plain

    def _read(self) -> None:
        stake, drafts, rights, seconds = self._sent.popleft()
        for rates, right in zip(self._rates, rights, strict=True):
            rates.note(drafts, right)
        self.policy.read_round(stake, 1 + sum(rights) / self.sequences, seconds)

    def _right(self, chance: Chance, sequence: int, drafts: int) -> int:
        """Drafts that are right: the text alone says which tokens can be foretold."""
        for count in range(drafts):
            place = self._at[sequence] + count + 1
            if self._draws[sequence][place] >= chance(sequence, place):
                return count
        return drafts


def always(chance: float) -> Chance:
    return lambda sequence, place: chance


def mean_speed(name: str, chance: float, fixed: int = 0, sequences: int = 1) -> float:
    speeds = [
        Text(name, sequences=sequences, seed=seed).answer(always(chance), ANSWER, fixed)
        for seed in range(5)
    ]
    return len(speeds) / sum(1 / speed for speed in speeds)


@in_commands("flat-4-False", "dear-4-True", "9B-1-True", "0.8B-1-False")
@in_commands(
    "flat-4-True",
    "dear-4-False",
    "9B-4-True",
    "0.8B-4-False",
    "flat-1-False",
    "dear-1-True",
    "9B-1-False",
    "0.8B-1-True",
)
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("name", COSTS)
def test_wrong_drafts_cost_two_percent_at_most(name: str, sequences: int, ahead: bool) -> None:
    for change in (0.0, 0.5, 1.0):
        text = Text(name, change, sequences, ahead)
        first = text.answer(always(0), ANSWER)
        assert 0.98 <= first < 1.0
        assert text.rounds > 0
        assert text.policy.costs.time("plain", sequences, sequences) == pytest.approx(
            STEP * (1 + TOKEN * (sequences - 1))
        )
        later = [text.answer(always(0), ANSWER) for _ in range(8)]
        assert min(later) >= 0.98
        assert sum(later) / len(later) >= 0.985  # who follows does not pay for all of it again


@pytest.mark.parametrize("name", COSTS)
def test_no_text_is_slower_whatever_luck_it_has(name: str) -> None:
    for chance in (0.1, 0.3, 0.6, 0.9):
        for seed in range(4):
            for late in (1.0, 20.0):
                text = Text(name, seed=seed, ahead=bool(seed % 2), late=late)
                least = 0.98 if late == 1.0 else 0.97
                assert text.answer(always(chance), ANSWER) >= least


@in_commands("flat-4", "9B-1")
@pytest.mark.parametrize(
    ("name", "sequences"), [("9B", 1), ("0.8B", 1), ("flat", 1), ("9B", 4), ("flat", 4)]
)
def test_right_drafts_are_as_fast_as_always_drafting(name: str, sequences: int) -> None:
    for chance in (0.9, 0.95):
        most = (1, 2, 3) if sequences == 4 else (1, 2, 3, 4)
        best = max(mean_speed(name, chance, fixed, sequences) for fixed in most)
        assert best > 1.1
        assert mean_speed(name, chance, 0, sequences) >= (0.97 if sequences == 1 else 0.93) * best


def test_drafts_that_pay_little_are_not_given_up() -> None:
    best = max(mean_speed("9B", 0.6, fixed) for fixed in (1, 2, 3, 4))
    assert best > 1.3
    assert mean_speed("9B", 0.6) > 0.93 * best


@in_commands("3-flat", "1-9B", "3-0.8B")
@pytest.mark.parametrize("name", ["9B", "0.8B", "flat"])
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_text_that_changes_keeps_the_bound_and_is_noticed(name: str, sequences: int) -> None:
    half = 768
    for seed in range(2):
        better = Text(name, sequences=sequences, seed=seed)
        least = 1.1 if sequences == 1 else 0.98
        assert better.answer(lambda _, place: 0.95 * (place >= half), 2 * half) > least
        worse = Text(name, sequences=sequences, seed=seed)
        assert worse.answer(lambda _, place: 0.95 * (place < half), 2 * half) > least


@pytest.mark.parametrize("name", ["9B", "0.8B", "flat"])
def test_drafts_without_a_limit_come_back_when_a_text_becomes_easy(name: str) -> None:
    """An answer that begins with hard prose goes on with code."""
    speeds = [
        Text(name, seed=seed, credit=math.inf).answer(lambda _, place: 0.95 * (place >= 96), 768)
        for seed in range(4)
    ]
    assert min(speeds) > 1.1, speeds


@in_commands("4-0.8B", "1-9B", "4-flat")
@pytest.mark.parametrize("name", ["9B", "0.8B", "flat"])
@pytest.mark.parametrize("held", [1, 4])
def test_rounds_that_were_held_up_at_first_do_not_end_drafting(name: str, held: int) -> None:
    """By a kernel that was compiled, or by another process: costs are measured again."""
    for seed in range(4):
        slow, usual = (Text(name, seed=seed, held=some) for some in (held, 0))
        speeds = [
            (slow.answer(always(0.9), ANSWER), usual.answer(always(0.9), ANSWER)) for _ in range(6)
        ]
        assert min(ours for ours, _ in speeds) >= 0.97
        assert speeds[-1][0] >= 0.97 * speeds[-1][1]


def test_one_number_serves_sequences_that_differ() -> None:
    """One sequence of four that is never right takes a quarter of the gain."""
    text = Text("flat", sequences=4)
    assert text.answer(lambda sequence, _: 0.95 * (sequence > 0), ANSWER) > 1.25


def test_the_next_request_begins_with_little_and_is_noticed() -> None:
    for name in ("9B", "flat"):
        text = Text(name)
        text.answer(always(0), 2048)
        text.policy.begin_request()
        assert FRESH <= text.policy.credit < BURST
        assert text.answer(always(0.95), ANSWER) > 1.5


def test_rates_are_told_apart_by_place() -> None:
    """The first is right four times in five, the second in half of these, the third never."""
    draw, rates = random.Random(3), AcceptanceRates((0.5, 0.5, 0.5))
    for _ in range(2000):
        rates.note(3, 0 if draw.random() < 0.2 else 1 if draw.random() < 0.5 else 2)
    assert rates.rates[0] == pytest.approx(0.8, abs=0.25)
    assert rates.rates[1] == pytest.approx(0.5, abs=0.3)
    assert rates.rates[2] < 0.01
    before = list(rates.rates)
    rates.note(1, 1)
    assert rates.rates[1] > before[1] > 0  # so that it is tried some time
    assert rates.rates[2] == before[2]  # nothing was said of it
    before = list(rates.rates)
    rates.note(2, 0)
    assert rates.rates[1:] == before[1:]
    child = rates.inherit()
    assert child.rates == [(0.5 + rate) / 2 for rate in rates.rates]


def test_the_first_draft_counts_more_than_later_ones() -> None:
    early, late = AcceptanceRates((0.8,)), AcceptanceRates((0.8,))
    for _ in range(100):
        late.note(1, 1)
    steps = []
    for rates in (early, late):
        before = rates.rates[0]
        rates.note(1, 0)
        steps.append((before - rates.rates[0]) / before)
    assert steps[0] > steps[1] == pytest.approx(0.1)


def test_as_many_drafts_as_give_the_most_tokens_for_their_time() -> None:
    policy = Policy(new_costs("cuda", False))
    for chance in (0.0, 0.05, 0.2, 0.5, 0.8, 0.95, 1.0):
        for slope in (0.02, 0.1, 0.4):
            speeds = [
                sum(chance**right for right in range(drafts + 1)) / (1 + slope * drafts)
                for drafts in range(16)
            ]
            plan = policy.plan(lambda k, slope=slope: 1 + slope * k, [[chance] * 15], 15)  # type: ignore[misc]
            assert plan.drafts == (speeds.index(max(speeds)) if max(speeds) > MARGIN else 0)
    assert policy.plan(lambda k: 1.0, [[1.0] * 3], 0) == Plan()
    both = policy.plan(lambda k: 1 + 0.2 * k, [[1.0] * 3, [0.0] * 3], 3)
    assert both.gain == pytest.approx((4 + 1) / 2 / 1.6)


def of_costs(credit: float = math.inf, change: float = 0.0) -> Policy:
    """A policy by rounds of 1.5, 2, 2.5... steps."""
    starts, each = dict.fromkeys(KINDS, 1.0), dict.fromkeys(KINDS, 0.5)
    return Policy(StepCosts(starts, each, change=change), credit)


def test_no_more_drafts_than_the_credit_covers() -> None:
    assert of_costs(BURST + 0.1).affordable("made", 1, 7) == 5
    assert of_costs(BURST + 0.1).affordable("made", 1, 2) == 2
    assert of_costs(BURST).affordable("made", 1, 7) == 2  # and as many once more
    assert of_costs(0.9).affordable("made", 1, 7) == 1  # but none twice
    assert of_costs(1.6, change=1.0).affordable("made", 1, 7) == 1
    assert of_costs(0.4).affordable("made", 1, 7) == 0
    assert of_costs(9.0).affordable("made", 1, 0) == 0
    assert of_costs().affordable("made", 1, 7) == 7
    policy = of_costs(1.6, change=1.0)
    policy.send("made", 1, 2)  # not read yet
    assert policy.affordable("made", 1, 7) == 0


def test_the_credit_has_its_limits() -> None:
    def after(credit: float, drafts: int, tokens: int) -> float:
        policy = of_costs(credit)
        policy.read_round(policy.send("made", 1, 1 + drafts), tokens, None)
        return policy.credit

    assert after(BURST, 1, 8) == pytest.approx(BURST + 6.5)
    assert after(11.0, 1, 8) == MOST_CREDIT
    assert after(1.0, 2, 1) == pytest.approx(2.0 * SHARE)
    for credit, found in ((1.0, 1.0 + SHARE), (BURST, BURST), (5.0, 5.0)):  # won, and kept
        policy = of_costs(credit)
        policy.read_plain(1, None)
        assert policy.credit == pytest.approx(found)
    for credit, found in ((5.0, BURST), (2.0, 2.0), (-1.0, FRESH)):
        policy = of_costs(credit)
        policy.begin_request()
        assert policy.credit == found


def test_requests_that_begin_at_once_forget_no_costs() -> None:
    policy = Policy(new_costs("cuda", True), BURST)
    for _ in range(5):
        policy.costs.note("plain", 1, 1, STEP)
        policy.costs.note("made", 1, 4, 9 * STEP)
    for _ in range(20):
        policy.begin_request()
    assert policy.costs.cost("made", 1)(3) == pytest.approx(9)
    for _ in range(8):
        for _ in range(FORGET_STEPS):
            policy.read_plain(1, STEP)
        policy.begin_request()
    assert policy.costs.cost("made", 1)(3) < 2


def test_requests_in_which_drafts_have_won_pay_for_the_next() -> None:
    policy = of_costs(2.0)
    policy.credit = 0.0
    policy.read_round(policy.send("made", 1, 3), 1, None)  # a round of two steps, both drafts wrong
    policy.begin_request()
    assert policy.credit == FRESH
    policy.read_round(policy.send("made", 1, 3), 3, None)
    policy.credit = 0.0
    policy.begin_request()
    assert policy.credit == BURST
    policy.read_round(policy.send("made", 1, 2), 1, None)  # what was won before counts for less
    policy.credit = 0.0
    policy.begin_request()
    assert policy.credit == FRESH


@pytest.mark.parametrize("credit", [BURST, math.inf])
def test_probes_back_off_and_come_back(credit: float) -> None:
    policy, pauses = of_costs(credit), []
    hopeless = [[0.01] * 7]

    def probe() -> int:
        return policy.plan(policy.costs.cost("made", 1), hopeless, 7, probe=True).drafts

    for _ in range(7):
        assert probe() == 1
        policy.read_round(policy.send("made", 1, 2), 1, None)
        policy.in_rounds, steps = False, 0
        while not probe():
            policy.read_plain(1, None)
            steps += 1
        pauses.append(steps)
    assert pauses == [FIRST_PAUSE, 16, 32, 64, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    stake = policy.send("made", 1, 2)
    assert probe() == 0  # until its result is known
    policy.read_round(stake, 2, None)
    assert probe() == 1


def test_drafts_without_a_limit_stay_so() -> None:
    policy = of_costs()
    policy.read_round(policy.send("made", 1, 8), 1, None)
    policy.read_plain(1, None)
    policy.begin_request()
    assert not policy.limited
    assert policy.affordable("made", 1, 7) == 7
