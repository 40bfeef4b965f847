"""Drafts that are worth a step: how often they were right, and what checking them costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

NEWEST = 0.15  # weight of the newest draft among those that have been checked
MARGIN = 1.05  # what drafts must promise to gain, so that a wrong guess of their cost loses little
FORGET = 0.005  # part of the way back to the first guess, for every step that goes without
RARELY = 20  # rounds in a row whose first draft was wrong, from which on drafts are tried rarely
LEARN = 0.15  # part of an error of a cost that a measurement corrects
OUTLIER = 2.0  # a measurement counts for at most so many times the estimate
FASTER, SLOWER = 0.1, 0.05  # weight of a step without drafts, below or above the average
LEAST = 0.01  # what anything can cost

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
    """Chooses the number of drafts that are all alike, for one sequence.

    Attributes:
        guess: chance that a draft is right behind right ones, before any has been checked.
        chance: the same after those that have been.
    """

    guess: float
    chance: float = field(init=False)

    def __post_init__(self) -> None:
        """Nothing has been checked."""
        self.chance = self.guess

    def plan(self, most: int, cost: Cost) -> Plan:
        """The number of drafts, up to `most`, with the most tokens for the time that they take."""
        return best_plan([self.chance] * most, cost)

    def skip(self) -> None:
        """Note that drafts could have been made and were not, so that they are tried again."""
        self.chance += FORGET * (self.guess - self.chance)

    def note(self, drafted: int, right: int) -> None:
        """Note how many drafts were right; those behind the first wrong one say nothing."""
        for hit in (True,) * right + (False,) * (right < drafted):
            self.chance += NEWEST * (hit - self.chance)


@dataclass(slots=True)
class PlacedPace:
    """Chooses the number of drafts that are less likely to be right the further they reach.

    Attributes:
        guesses: chance that a draft is right behind right ones, by its place, before any has been
            checked.
        chances: the same after those that have been.
        wrong: rounds in a row whose first draft was wrong.
    """

    guesses: tuple[float, ...]
    chances: list[float] = field(default_factory=list)
    wrong: int = 0

    def __post_init__(self) -> None:
        """Begin with the guesses where nothing else is given."""
        self.chances = self.chances or list(self.guesses)

    def skip(self) -> None:
        """Move the chances back towards the first guesses, so that drafts are tried again.

        More slowly the more often they have been in vain.
        """
        part = FORGET / (1 + min(self.wrong, RARELY))
        for place, guess in enumerate(self.guesses):
            self.chances[place] += part * (guess - self.chances[place])

    def note(self, drafted: int, right: int) -> None:
        """Note how many drafts were right; those behind the first wrong one say nothing."""
        self.wrong = 0 if right else self.wrong + 1
        for place in range(min(right + 1, drafted, len(self.chances))):
            self.chances[place] += NEWEST * ((place < right) - self.chances[place])

    def successor(self) -> "PlacedPace":
        """The pace of another sequence, which begins halfway between these chances and guesses."""
        pairs = zip(self.guesses, self.chances, strict=True)
        return PlacedPace(self.guesses, [(guess + chance) / 2 for guess, chance in pairs])


def best_plan(chances: Sequence[float], cost: Cost) -> Plan:
    """The number of drafts with the most tokens for the time that they take.

    chances: of each draft to be right behind right ones.
    """
    return common_plan([chances], len(chances), cost)


def common_plan(chances: Sequence[Sequence[float]], most: int, cost: Cost) -> Plan:
    """The number of drafts of each of several sequences, up to `most`, all of them alike.

    chances: by sequence, see `best_plan`.
    """
    best, expected = Plan(), float(len(chances))
    right = [1.0] * len(chances)
    for drafts in range(1, most + 1):
        right = [so_far * each[drafts - 1] for so_far, each in zip(right, chances, strict=True)]
        expected += sum(right)
        gain = expected / len(chances) / cost(drafts)
        if gain > max(best.gain, MARGIN):
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
        """Correct the line by a measured cost, which counts for little where it is far off.

        Something else may have held a step up, such as the recording of a graph.
        """
        thought = self.at(count)
        error = min(cost, OUTLIER * thought) - thought
        part = LEARN * error / (1 + count * count)
        self.start = max(0.0, self.start + part)
        self.each = max(LEAST, self.each + part * count)


@dataclass(slots=True)
class Costs:
    """Costs of steps with drafts, against steps of as many sequences without.

    Attributes:
        given: by tokens beyond one, of rounds whose drafts come from the host.
        head: by drafts, of rounds whose drafts the model's head makes, or a drafter.
        measured: learn from the steps; else the first guess stays.
        width: tokens that a step of so many takes, padding included.
        step_s: seconds of a step of one token; None before the first.
    """

    given: Line
    head: Line
    measured: bool = False
    width: Callable[[int], int] = field(default=lambda tokens: tokens)
    step_s: float | None = None

    def checking(self, sequences: int) -> Cost:
        """Cost of checking so many drafts of each of several sequences in a step."""
        plain = self._plain(sequences)
        return lambda k: self.given.at(self.width(sequences * (1 + k)) - 1) / plain

    def drafting(self, sequences: int) -> Cost:
        """The same, where the model's head, or a drafter, makes the drafts first."""
        plain, width = self._plain(sequences), self.width
        return lambda k: self.head.at(width(sequences * (1 + k)) - sequences) / plain

    def note_step(self, tokens: int, seconds: float) -> None:
        """Take down how long a step without drafts took, of a token of each sequence."""
        if self.measured:
            one = seconds / self._plain(tokens)
            known = one if self.step_s is None else self.step_s
            found = min(one, OUTLIER * known)
            self.step_s = known + (FASTER if found < known else SLOWER) * (found - known)

    def note_round(self, tokens: int, seconds: float) -> None:
        """Take down how long a step with given drafts took, of so many tokens in all."""
        if self.measured and self.step_s is not None:
            self.given.learn(self.width(tokens) - 1, seconds / self.step_s)

    def note_head(self, drafts: int, sequences: int, seconds: float) -> None:
        """Take down how long a step took in which drafts of each sequence were made first."""
        if self.measured and self.step_s is not None:
            beyond = self.width(sequences * (1 + drafts)) - sequences
            self.head.learn(beyond, seconds / self.step_s)

    def _plain(self, sequences: int) -> float:
        """Cost of a step without drafts."""
        return 1 + self.given.each * (self.width(sequences) - 1)


def new_costs(
    device: str,
    measured: bool,
    width: Callable[[int], int] | None = None,
    drafter: bool = False,
) -> Costs:
    """The guess for `cpu` or `cuda`, to be corrected by what is measured or not.

    On a GPU, and where somebody asks for drafts whatever they cost: those of an H200 with models of
    4B to 9B. Small models have dearer rounds there, and a CPU takes tokens one by one.

    Args:
        device: of the model.
        measured: whether they are corrected.
        width: see `Costs`; None where a step takes no padding.
        drafter: makes a block of drafts in one pass, where a head takes a pass for each.
    """
    width = width or (lambda tokens: tokens)
    if measured and device == "cpu":
        made = Line(0.3, 0.35) if drafter else Line(0.0, 0.8)
        return Costs(Line(0.0, 0.4), made, measured, width)
    made = Line(0.35, 0.08) if drafter else Line(0.05, 0.18)
    return Costs(Line(0.15, 0.08), made, measured, width)
