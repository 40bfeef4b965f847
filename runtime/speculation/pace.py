"""How many drafts are worth a step: from how often they were right, and what a wider step costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

NEWEST = 0.15  # weight of the newest draft among those that have been checked
MARGIN = 1.05  # what drafts must promise to gain, so that a wrong guess of their cost loses little
FORGET = 0.005  # part of the way back to the first guess, for every step that goes without
RARELY = 20  # rounds in a row whose first draft was wrong, from which on drafts are tried rarely

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
