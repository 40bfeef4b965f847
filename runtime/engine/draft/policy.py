"""Number of drafts to check in a step: the most expected tokens for the measured time.

`AcceptanceRates` average how often drafts were accepted, by place; `StepCosts` is a table of how
long steps took, by their tokens. Neither changes a token of an answer.

**Bound.** The credit of `auto` is the time, in plain steps, that drafts may still lose. A round of
t steps that gives each sequence n tokens adds n - t; a step adds SHARE of its time, up to BURST.
A round is sent only if the credit covers it with all drafts wrong, beside the rounds not yet read.
Let N tokens of every sequence take the time T. At the end the credit is at most BURST + SHARE T -
(T - N), and at least -e, where e is what rounds took beyond their estimates. So for every request

    T <= (N + BURST + e) / (1 - SHARE):

256 tokens take 259.8 steps, 0.985 of plain decoding's speed. Recorded CUDA graphs do not count.

Every request has a credit of FRESH, and of BURST if drafts have won more in the last requests than
they lost. Up to BURST a round takes at most half of it, if half covers any: so one wrong round
leaves enough for another.

**Probes.** Where drafts do not pay by what was learned, one is checked now and then, without a
credit too: text that is hard now may be easy later. The pause doubles behind a wrong probe, from
FIRST_PAUSE to LONGEST_PAUSE steps, and ends behind a right one. Wrong rounds that were not probes
do not lengthen it: a hard passage has several of them in a row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Literal

BURST = 2.5  # steps that a request may lose beside SHARE
FRESH = 1.0  # steps of them that every request has, whatever others lost
KEPT = 0.5  # part of what drafts have won or lost that still counts in the next request
SHARE = 0.005  # of all time
MOST_CREDIT = 12.0  # steps; beyond BURST they were saved in the same request
MARGIN = 1.05  # least gain of drafts without a credit, which covers wrong guesses of their cost
STAY = 0.97  # least gain within rounds, since leaving and coming back costs a change
KEEP = 1.03  # gain of the last number of drafts, since another one waits for the host
RECENT = 0.1  # least weight of the newest draft in an acceptance rate
PRIOR = 7  # drafts that the first guess of a rate counts for
FIRST_STEPS = 3  # of which the fastest counts; the first ones are slower than later ones
FASTER, SLOWER = 0.15, 0.05  # weights of a plain step below and above the average of its size
LAST_ROUNDS = 5  # of a size, the median of which counts
FORGET_STEPS = 64  # steps after which the oldest rounds may be forgotten
FEW_ROUNDS = 2  # of a size, beside which the estimate counts as one more
OUTLIER = 2.0  # a step counts for at most so many times its estimate
FURTHER = 0.7  # part of what a token adds to steps up to the widest known one, beyond it
CHANGE = 0.5  # steps: a GPU waits for the host at a change to rounds, the head catches up
LEARN_CHANGE = 0.3  # weight of the newest change, which is rare
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # plain steps behind a wrong probe

Kind = Literal["plain", "given", "made"]  # without drafts; with the host's, a head's or a drafter's
Cost = Callable[[int], float]  # of checking so many drafts of every sequence, in plain steps


@dataclass(frozen=True, slots=True)
class Plan:
    """A number of drafts for every sequence, and the tokens that come in a plain step's time."""

    drafts: int = 0
    gain: float = 1.0


@dataclass(slots=True)
class AcceptanceRates:
    """Acceptance rates of a sequence's drafts by place, given that all before were accepted."""

    guesses: Sequence[float]  # before any draft has been checked
    rates: list[float] = field(default_factory=list)  # learned since
    _checked: list[int] = field(init=False)  # drafts, by place

    def __post_init__(self) -> None:
        """Begin with the guesses unless rates are given."""
        self.rates = self.rates or list(self.guesses)
        self._checked = [0] * len(self.rates)

    def note(self, drafted: int, accepted: int) -> None:
        """Learn how many drafts were accepted; those behind the first wrong one say nothing.

        Where all were, the next place becomes likelier, so that it is tried some time.
        """
        for place in range(min(accepted + 1, drafted, len(self.rates))):
            self._checked[place] += 1
            weight = max(RECENT, 1 / (PRIOR + self._checked[place]))
            self.rates[place] += weight * ((place < accepted) - self.rates[place])
        if accepted == drafted < len(self.rates):
            self.rates[drafted] += RECENT / 2 * (1 - self.rates[drafted])

    def inherit(self) -> "AcceptanceRates":
        """Rates for another sequence: halfway between the guesses and what was learned here."""
        pairs = zip(self.guesses, self.rates, strict=True)
        return AcceptanceRates(self.guesses, [(guess + rate) / 2 for guess, rate in pairs])


@dataclass(slots=True)
class StepCosts:
    """Times of steps by kind, sequences and tokens, estimated where none has been measured."""

    start: dict[Kind, float]  # first guess of a step of one sequence, in plain steps
    each: dict[Kind, float]  # what a further token adds to it, or a draft to one that is "made"
    measured: bool = False  # steps correct the guess
    width: Callable[[int], int] = field(default=lambda tokens: tokens)  # of a step, with padding
    change: float = 0.0  # cost of the change to rounds and back, beyond the rounds
    # Cost of a further sequence; by default that of a token, and nothing where drafts are "made"
    sequence: dict[Kind, float] = field(default_factory=dict)
    ready: bool = field(init=False)  # the time of a plain step is known, or nothing is measured
    _table: dict[tuple[Kind, int, int], tuple[float, int]] = field(default_factory=dict)
    _estimates: dict[tuple[Kind, int, int], float] = field(default_factory=dict)  # plain steps
    # Seconds of the last rounds of a size, behind the estimate from before there were any
    _rounds: dict[tuple[Kind, int, int], list[float]] = field(default_factory=dict)
    _measured: set[tuple[Kind, int, int]] = field(default_factory=set)  # since `forget_some`

    def __post_init__(self) -> None:
        """Wait for the time of a plain step unless nothing is measured."""
        self.ready = not self.measured

    def time(self, kind: Kind, sequences: int, tokens: int) -> float:
        """Seconds of a step of so many tokens in all; in plain steps where none was measured."""
        key = kind, sequences, self.width(tokens)
        if known := self._table.get(key):
            return known[0]
        if kind == "plain":
            return self._estimate(*key)
        plain = self.time("plain", sequences, sequences)
        if key not in self._estimates:
            self._estimates[key] = self._estimate(*key) / plain
        return self._estimates[key] * plain

    def in_steps(self, sequences: int, seconds: float) -> float:
        """A time in plain steps of so many sequences."""
        return seconds / self.time("plain", sequences, sequences)

    def cost(self, kind: Kind, sequences: int) -> Cost:
        """Cost of a step by its drafts of every sequence, in plain steps of these sequences."""
        plain = self.time("plain", sequences, sequences)
        return lambda drafts: self.time(kind, sequences, sequences * (1 + drafts)) / plain

    def note(self, kind: Kind, sequences: int, tokens: int, seconds: float) -> None:
        """Learn the time of a step; one far off counts for little, since it may have been held.

        No round is taken for faster than a plain step.
        """
        if not self.measured:
            return
        key = kind, sequences, self.width(tokens)
        if kind != "plain":
            times = self._rounds.setdefault(key, [self._estimate(*key)])
            times.append(max(seconds, self.time("plain", sequences, sequences)))
            del times[1:-LAST_ROUNDS]
            self._measured.add(key)
            self._judge(key)
            return
        known, count = self._table.get(key, (0.0, 0))
        if count < FIRST_STEPS:
            known = min(seconds, known) if count else seconds
            self.ready = self.ready or count + 1 == FIRST_STEPS
            self._estimates.clear()
        else:
            found = min(seconds, OUTLIER * known)
            weight = max(FASTER if found < known else SLOWER, 1 / (2 + count))
            known += weight * (found - known)
        self._table[key] = known, count + 1

    def forget_some(self) -> None:
        """Forget the oldest round of each size of which none was measured since the last call.

        A size that is taken for dear is never sent, and so not measured again. Without rounds it is
        estimated, as it was before the first.
        """
        for key in [key for key in self._rounds if key not in self._measured]:
            del self._rounds[key][1]
            self._judge(key)
        self._measured.clear()

    def _judge(self, key: tuple[Kind, int, int]) -> None:
        """The time of a round: the median of its last ones, and of the estimate where they are few.

        So one that was held up does not count alone.
        """
        times = self._rounds[key]
        self._estimates.clear()
        if len(times) == 1:
            del self._rounds[key], self._table[key]
        else:
            own = times if len(times) - 1 <= FEW_ROUNDS else times[1:]
            self._table[key] = median_low(own), len(times) - 1

    def note_change(self, cost: float) -> None:
        """Learn the cost of a change from plain steps to rounds and back."""
        if self.measured:
            most = OUTLIER * max(self.change, CHANGE)
            self.change += LEARN_CHANGE * (min(max(cost, 0.0), most) - self.change)

    def _guess(self, kind: Kind, sequences: int, M: int) -> float:
        each = self.each[kind]
        beside = self.sequence.get(kind, 0.0 if kind == "made" else each)
        return self.start[kind] + beside * (sequences - 1) + each * (M - sequences)

    def _estimate(self, kind: Kind, sequences: int, M: int) -> float:
        """Time of an unknown step: on the line through known ones, the plain one included.

        If there are none, the first guess, times what the nearest step took against its own.
        """
        known = sorted(
            (width, time)
            for (other, B, width), (time, _) in self._table.items()
            if (other, B) == (kind, sequences)
        )
        if known and kind != "plain":
            points = [(self.width(sequences), self.time("plain", sequences, sequences)), *known]
            end = next((at for at, (width, _) in enumerate(points) if width > M), len(points) - 1)
            (low, shorter), (high, longer) = points[end - 1], points[end]
            slope = max(0.0, longer - shorter) / max(1, high - low)
            return longer + slope * (M - high) * (FURTHER if high < M else 1.0)
        keys = [key for key in self._table if key[0] == kind]
        keys = keys or [key for key in self._table if key[0] == "plain"]
        guess = self._guess(kind, sequences, M)
        if not keys:
            return guess
        nearest = min(keys, key=lambda key: abs(key[1] - sequences) + abs(key[2] - M))
        return guess * self._table[nearest][0] / self._guess(*nearest)


def new_costs(
    device: str,
    measured: bool,
    width: Callable[[int], int] | None = None,
    drafter: bool = False,
) -> StepCosts:
    """First guess of the costs on `cpu` or `cuda`; a drafter makes a block of drafts in one pass.

    Where nothing is measured, and on a GPU: costs on an H200 with models of 4B to 9B. Small models
    have dearer rounds there, and a CPU takes tokens one by one.
    """
    sequence: dict[Kind, float] = {}
    if measured and device == "cpu":
        each, given, made = 0.4, 1.0, (1.3, 0.35) if drafter else (1.0, 0.8)
    else:
        each, given, made = 0.08, 1.15, (1.35, 0.055) if drafter else (1.05, 0.18)
        sequence = {"made": 0.13 if drafter else each}
    return StepCosts(
        start={"plain": 1.0, "given": given, "made": made[0]},
        each={"plain": each, "given": each, "made": made[1]},
        measured=measured,
        width=width or (lambda tokens: tokens),
        change=CHANGE if measured else 0.0,
        sequence=sequence,
    )


@dataclass(frozen=True, slots=True)
class Stake:
    """A round under way, and what it may lose."""

    kind: Kind
    sequences: int
    tokens: int  # of all sequences
    loss: float  # plain steps
    change: float | None  # plain steps beside these, if it does not follow a round
    steady: bool  # its time is its own: nothing waited for the host


@dataclass(slots=True)
class Policy:
    """Chooses numbers of drafts, and keeps account of what they lose."""

    costs: StepCosts
    credit: float = math.inf  # plain steps that drafts may still lose
    in_rounds: bool = False  # the last step that was sent checks drafts
    _drafts: int = 0  # made for each sequence in the last such round
    _pause: int = 0  # plain steps before the next probe
    _waited: int = 0  # plain steps since the last round of made drafts
    _excess: float | None = None  # cost of a change to rounds; None before they have been left
    _won: float = 0.0  # plain steps, in the last requests; see KEPT
    _read: int = 0  # steps since costs were last forgotten

    @property
    def limited(self) -> bool:
        """True if drafts may not lose more than the credit."""
        return self.credit < math.inf

    def begin_request(self) -> None:
        """Limit the credit for another text, which may differ: a probe comes soon."""
        if self.limited:
            least = BURST if self._won > 0 else FRESH
            self.credit = min(max(self.credit, least), BURST)
        self._won *= KEPT
        self._pause = min(self._pause, FIRST_PAUSE)
        self._forget()

    def affordable(self, kind: Kind, sequences: int, most: int) -> int:
        """Most drafts, up to `most`, whose failure the credit covers; 0 before costs are known.

        Up to BURST those whose failure it covers twice, if there are any.
        """
        left = self.credit + 1 - (0.0 if self.in_rounds else self.costs.change)
        if most == 0 or left < 1 or not self.costs.ready:  # often, so that it must be quick
            return 0
        cost = self.costs.cost(kind, sequences)
        if cost(1) > left:
            return 0
        half = (left + 1) / 2 if self.credit <= BURST else left
        return next(k for limit in (half, left) for k in range(most, 0, -1) if cost(k) <= limit)

    def plan(
        self, cost: Cost, rates: Sequence[Sequence[float]], most: int, probe: bool = False
    ) -> Plan:
        """Number of drafts, the same for all sequences, with the most tokens for the time.

        Args:
            cost: of checking them.
            rates: see `AcceptanceRates`, by sequence.
            most: affordable drafts.
            probe: made drafts: check one if it is time to, though none pays by what was learned.
        """
        best, expected, accepted = Plan(), float(len(rates)), [1.0] * len(rates)
        least = MARGIN if not self.limited else STAY if self.in_rounds else 1.0
        now = self._drafts if probe and self.in_rounds else 0
        for drafts in range(1, most + 1):
            accepted = [p * each[drafts - 1] for p, each in zip(accepted, rates, strict=True)]
            expected += sum(accepted)
            gain = expected / len(rates) / cost(drafts) * (KEEP if drafts == now else 1.0)
            if gain > (best.gain if best.drafts else least):
                best = Plan(drafts, gain)
        if probe and most and not best.drafts and self._waited >= self._pause:
            self._forget()
            return Plan(1)
        return best

    def send(self, kind: Kind, sequences: int, tokens: int, steady: bool = True) -> Stake:
        """Take what a round may lose from the credit until it has been read; see `Stake`."""
        loss = self.costs.in_steps(sequences, self.costs.time(kind, sequences, tokens)) - 1
        change = None if self.in_rounds else self.costs.change
        steady = kind == "given" or (steady and self.in_rounds)  # each given round waits
        stake = Stake(kind, sequences, tokens, loss, change, steady)
        self._spend(-loss - (change or 0.0))
        self.in_rounds = True
        if kind == "made":
            self._drafts = tokens // sequences - 1
            self._waited, self._pause = 0, max(self._pause, 1)
        return stake

    def read_round(self, stake: Stake, tokens: float, seconds: float | None) -> None:
        """Give back what a round did not lose, by the tokens that it gave each sequence.

        Learn from its seconds, unless they are not known.
        """
        expected, change = 1 + stake.loss, stake.change or 0.0
        taken = expected + change / 2
        if seconds is not None:
            taken = min(self.costs.in_steps(stake.sequences, seconds), OUTLIER * (1 + expected))
            if stake.steady:
                self.costs.note(stake.kind, stake.sequences, stake.tokens, seconds)
        if stake.change is not None:
            self._excess = taken - expected
        if stake.kind == "made":
            probed = stake.change is not None  # it does not follow a round
            pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, self._pause * (2 if probed else 1)))
            self._pause, self._waited = 0 if tokens > 1 else pause, 0
        self._count(stake.loss + change + tokens - taken, taken)

    def read_plain(self, sequences: int, seconds: float | None) -> None:
        """Learn from the time of a plain step; behind rounds it is part of the change from them."""
        taken, excess = 1.0, self._excess
        self._excess, self._waited = None, self._waited + 1
        if seconds is not None and excess is not None:
            taken = min(self.costs.in_steps(sequences, seconds), 2 * OUTLIER)
            self.costs.note_change(excess + taken - 1)
        elif seconds is not None:
            self.costs.note("plain", sequences, sequences, seconds)
        self._count(1 - taken, taken)

    def _forget(self) -> None:
        """Forget some costs, but not as often as many requests begin."""
        if self._read >= FORGET_STEPS:
            self.costs.forget_some()
            self._read = 0

    def _count(self, won: float, taken: float) -> None:
        """Count a step; the share of its time never lifts the credit above BURST."""
        self._read += 1
        self._spend(won)
        if self.limited:
            credit = min(MOST_CREDIT, self.credit)
            self.credit = max(credit, min(BURST, credit + SHARE * taken))

    def _spend(self, won: float) -> None:
        self.credit, self._won = self.credit + won, self._won + won
