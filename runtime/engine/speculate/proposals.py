"""Drafts proposed on the host, and the number of drafts that is worth checking.

A step chooses behind every draft what it would have chosen without drafts, with the same bits. A
draft is accepted if it is that token, so the output never depends on drafts, sampled or not.

N-gram drafts copy what followed where the end of the text stood before (prompt lookup decoding,
A. Saxena, 2023); the longest match wins, of equals the last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

NEWEST = 0.15  # weight of the newest checked copy in a chance
NEWEST_PLACED = 0.1  # weight of the newest checked draft of a head or drafter, by its place
MARGIN = 1.05  # least gain of a plan with drafts, so that a wrong guess of their cost loses little
FORGET = 0.005  # part of the way back to the first guess, for every step without copies
LEARN = 0.15  # part of an error of a cost that a measurement corrects
OUTLIER = 2.0  # a measurement counts for at most so many times the estimate
FIRST_STEPS = 3  # of which the fastest counts; the first ones are slower than later ones
FASTER, SLOWER = 0.1, 0.05  # weight of a step without drafts, below or above the average
LEAST = 0.01  # lower bound of a cost
CHANGE = 0.5  # steps: a GPU waits for the host at a change to rounds, the head catches up
LEARN_CHANGE = 0.3  # as LEARN, of the cost of a change, which is measured rarely
LEAST_MATCH = 3  # tokens; shorter matches are found in any text
LONGEST_MATCH = 16  # tokens that are compared
# First chance that a draft is right, by the least length of the match that it follows.
GUESSES = {12: 0.9, 6: 0.75, 3: 0.5}

Cost = Callable[[int], float]  # of checking so many drafts, in steps of one token


@dataclass(frozen=True, slots=True)
class Plan:
    """A number of drafts.

    Attributes:
        drafts: to check in a step.
        gain: tokens that come in the time of a step without drafts.
    """

    drafts: int = 0
    gain: float = 1.0


@dataclass(slots=True)
class Pace:
    """Number of drafts for one sequence, all equally likely to be right.

    Attributes:
        guess: chance that a draft is right behind right ones, before any has been checked.
        chance: the same, learnt from the drafts that have been checked.
    """

    guess: float
    chance: float = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the guess."""
        self.chance = self.guess

    def plan(self, most: int, cost: Cost) -> Plan:
        """The number of drafts, up to `most`, with the most tokens for the time that they take."""
        return common_plan([[self.chance] * most], most, cost)

    def skip(self) -> None:
        """Note that drafts could have been made and were not, so that they are tried again."""
        self.chance += FORGET * (self.guess - self.chance)

    def note(self, drafted: int, right: int) -> None:
        """Note how many drafts were right; those behind the first wrong one say nothing."""
        for hit in (True,) * right + (False,) * (right < drafted):
            self.chance += NEWEST * (hit - self.chance)


@dataclass(slots=True)
class PlacedPace:
    """Number of drafts for one sequence, less likely to be right the further they reach.

    Attributes:
        guesses: chance that a draft is right behind right ones, by its place, before any has been
            checked.
        chances: the same, learnt from the drafts that have been checked.
    """

    guesses: tuple[float, ...]
    chances: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with the guesses where nothing else is given."""
        self.chances = self.chances or list(self.guesses)

    def note(self, drafted: int, right: int) -> None:
        """Note how many drafts were right; those behind the first wrong one say nothing.

        Where all were right, the next place becomes likelier, so that it is tried some time.
        """
        for place in range(min(right + 1, drafted, len(self.chances))):
            self.chances[place] += NEWEST_PLACED * ((place < right) - self.chances[place])
        if right == drafted < len(self.chances):
            self.chances[drafted] += NEWEST_PLACED / 2 * (1 - self.chances[drafted])

    def successor(self) -> "PlacedPace":
        """The pace of another sequence, which begins halfway between these chances and guesses."""
        pairs = zip(self.guesses, self.chances, strict=True)
        return PlacedPace(self.guesses, [(guess + chance) / 2 for guess, chance in pairs])


def common_plan(
    chances: Sequence[Sequence[float]], most: int, cost: Cost, least: float = MARGIN
) -> Plan:
    """Number of drafts, one for all sequences and at most `most`, with the most tokens per time.

    Args:
        chances: of each draft to be right behind right ones, by sequence.
        most: drafts.
        cost: of checking them.
        least: gain that drafts must exceed.
    """
    best, expected = Plan(), float(len(chances))
    right = [1.0] * len(chances)
    for drafts in range(1, most + 1):
        right = [so_far * each[drafts - 1] for so_far, each in zip(right, chances, strict=True)]
        expected += sum(right)
        gain = expected / len(chances) / cost(drafts)
        if gain > max(best.gain, least):
            best = Plan(drafts, gain)
    return best


@dataclass(slots=True)
class Line:
    """A cost that grows with the number of tokens or drafts, in steps of one token.

    Attributes:
        start: of a round beyond a step, whatever it checks.
        each: of every further token or draft.
    """

    start: float
    each: float

    def at(self, count: int) -> float:
        """Cost of a round with so many of them."""
        return 1 + self.start + self.each * count

    def learn(self, count: int, cost: float) -> None:
        """Correct the line by a measured cost.

        One that is far off counts for little: the recording of a graph may have held the step up.
        """
        thought = self.at(count)
        error = min(cost, OUTLIER * thought) - thought
        part = LEARN * error / (1 + count * count)
        self.start = max(0.0, self.start + part)
        self.each = max(LEAST, self.each + part * count)


@dataclass(slots=True)
class Costs:
    """Costs of steps with drafts, relative to steps of as many sequences without.

    Attributes:
        given: of rounds with drafts from the host, by tokens beyond one.
        head: of rounds with drafts from the model's head or a drafter, by drafts.
        measured: learn from the steps; else the first guess stays.
        width: tokens of a step with its padding.
        change: from plain steps to rounds and back, beyond the rounds.
        step_s: seconds of a step of one token; None before the first.
        steps: measured ones.
    """

    given: Line
    head: Line
    measured: bool = False
    width: Callable[[int], int] = field(default=lambda tokens: tokens)
    change: float = 0.0
    step_s: float | None = None
    steps: int = 0

    @property
    def ready(self) -> bool:
        """True if the unit of the costs is known, or is not measured."""
        return not self.measured or self.steps >= FIRST_STEPS

    def checking(self, sequences: int) -> Cost:
        """Cost of checking k drafts of each sequence in a step."""
        plain = self._plain(sequences)
        return lambda k: self.given.at(self.width(sequences * (1 + k)) - 1) / plain

    def drafting(self, sequences: int) -> Cost:
        """Cost of the same step where the model's head or a drafter makes the drafts first."""
        plain, width = self._plain(sequences), self.width
        return lambda k: self.head.at(width(sequences * (1 + k)) - sequences) / plain

    def note_step(self, tokens: int, seconds: float) -> None:
        """Note the time of a step without drafts, of a token of each sequence."""
        if self.measured:
            one = seconds / self._plain(tokens)
            known = one if self.step_s is None else self.step_s
            found = min(one, OUTLIER * known)
            weight = FASTER if found < known else SLOWER
            first = self.steps < FIRST_STEPS
            self.step_s = min(found, known) if first else known + weight * (found - known)
            self.steps += 1

    def note_round(self, tokens: int, seconds: float) -> None:
        """Note the time of a step with drafts from the host, of `tokens` in all."""
        if self.measured and self.step_s is not None:
            self.given.learn(self.width(tokens) - 1, seconds / self.step_s)

    def note_head(self, drafts: int, sequences: int, seconds: float) -> None:
        """Note the time of a step that made `drafts` of each sequence first."""
        if self.measured and self.step_s is not None:
            beyond = self.width(sequences * (1 + drafts)) - sequences
            self.head.learn(beyond, seconds / self.step_s)

    def note_change(self, cost: float) -> None:
        """Note the cost of a change from plain steps to a round and back."""
        if self.measured:
            most = OUTLIER * max(self.change, CHANGE)
            self.change += LEARN_CHANGE * (min(max(cost, 0.0), most) - self.change)

    def in_steps(self, sequences: int, seconds: float | None) -> float | None:
        """A time in plain steps of so many sequences; None if one of the two is unknown."""
        if seconds is None or self.step_s is None or not self.ready:
            return None
        return seconds / (self.step_s * self._plain(sequences))

    def _plain(self, sequences: int) -> float:
        """Cost of a step without drafts."""
        return 1 + self.given.each * (self.width(sequences) - 1)


def new_costs(
    device: str,
    measured: bool,
    width: Callable[[int], int] | None = None,
    drafter: bool = False,
) -> Costs:
    """First guess of the costs on `cpu` or `cuda`.

    Where nothing is measured, and on a GPU: costs on an H200 with models of 4B to 9B. Small models
    have dearer rounds there, and a CPU takes tokens one by one.

    Args:
        device: of the model.
        measured: correct the guess by the steps.
        width: see `Costs`; None for steps without padding.
        drafter: makes a block of drafts in one pass, where a head takes a pass for each.
    """
    if measured and device == "cpu":
        given, block, head = Line(0.0, 0.4), Line(0.3, 0.35), Line(0.0, 0.8)
    else:
        given, block, head = Line(0.15, 0.08), Line(0.35, 0.08), Line(0.05, 0.18)
    made = block if drafter else head
    change = CHANGE if measured else 0.0
    return Costs(given, made, measured, width or (lambda tokens: tokens), change)


class Drafter(Protocol):
    """Drafts for one sequence; called on the engine's thread, in order."""

    def append(self, id: int) -> None:
        """Take the next token of the sequence."""

    def propose(self, most: int, cost: Cost, least_gain: float) -> Sequence[int]:
        """Up to `most` tokens that may come next; a query, which changes nothing.

        Args:
            most: tokens.
            cost: of checking them.
            least_gain: gain of the alternative (see `Plan`); nothing is proposed below it.
        """

    def note(self, drafted: int, right: int) -> None:
        """Learn how many proposed tokens were checked, and how many were right."""

    def skip(self) -> None:
        """Note a step without proposals from here, so that they are tried again."""


NewDrafter = Callable[[Sequence[int]], Drafter]  # from the first tokens of a sequence


class NgramDrafter:
    """Copies what followed where the end of the text stood before."""

    def __init__(self, ids: Sequence[int]) -> None:
        """Begin with the tokens of a prompt."""
        self._text = GrowingText(ids)
        self._paces = {least: Pace(chance) for least, chance in GUESSES.items()}

    def append(self, id: int) -> None:
        """Take the next token of the sequence."""
        self._text.append(id)

    def propose(self, most: int, cost: Cost, least_gain: float = 1.0) -> Sequence[int]:
        """Tokens that followed the longest match; see `Drafter.propose`."""
        match = self._text.match()
        if match is None:
            return ()
        plan = self._pace(match).plan(most, cost)
        return self._text.following(match, plan.drafts) if plan.gain > least_gain else ()

    def note(self, drafted: int, right: int) -> None:
        """Learn how many drafts behind the present match were right."""
        match = self._text.match()
        if match is not None:
            self._pace(match).note(drafted, right)

    def skip(self) -> None:
        """Note that nothing behind the present match was proposed."""
        match = self._text.match()
        if match is not None:
            self._pace(match).skip()

    def _pace(self, match: "Match") -> Pace:
        return next(pace for least, pace in self._paces.items() if match.length >= least)


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the text's last tokens.

    Attributes:
        length: tokens of the match, at most LONGEST_MATCH.
        stop: index behind the match.
    """

    length: int
    stop: int


class GrowingText:
    """Token ids of a sequence, searched for earlier occurrences of its end."""

    def __init__(self, ids: Sequence[int]) -> None:
        """The text begins with these ids."""
        self._ids: NDArray[np.int64] = np.array(ids, dtype=np.int64)
        self._length = len(ids)
        self._found: tuple[int, Match | None] = (0, None)  # length, what was found there

    def __len__(self) -> int:
        """Tokens."""
        return self._length

    def append(self, id: int) -> None:
        """The text goes on."""
        if self._length == len(self._ids):
            self._ids = np.resize(self._ids, 2 * self._length + 64)
        self._ids[self._length] = id
        self._length += 1

    def match(self) -> Match | None:
        """The longest match of the text's end; None below LEAST_MATCH."""
        if self._found[0] != self._length:
            self._found = self._length, self._search()
        return self._found[1]

    def _search(self) -> Match | None:
        ids = self._ids[: self._length]
        places = np.flatnonzero(ids[:-1] == ids[-1])  # of equal last tokens
        length = 1
        while length < LONGEST_MATCH:
            before = places[places >= length]
            longer = before[ids[before - length] == ids[-1 - length]] if len(before) else before
            if not len(longer):
                break
            places, length = longer, length + 1
        return Match(length, int(places[-1]) + 1) if length >= LEAST_MATCH else None

    def following(self, match: Match, count: int) -> list[int]:
        """`count` tokens behind a match, repeated from its end where the text has no more."""
        period = self._length - match.stop
        places = match.stop + np.arange(count) % period
        return [int(id) for id in self._ids[places]]
