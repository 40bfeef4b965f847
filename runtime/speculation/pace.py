"""How many drafts are worth a step: from how often they were right, and what a wider step costs."""

from collections.abc import Callable
from dataclasses import dataclass

NEWEST = 0.15  # weight of the newest draft among those that have been checked
FORGET = 0.005  # part of the way back to the first guess, for every time that none was worth it

Cost = Callable[[int], float]  # of a step of so many tokens, in steps of one


@dataclass(slots=True)
class Pace:
    """Chooses the number of drafts of one sequence and kind.

    Attributes:
        guess: chance that a draft is right behind right ones, before any has been checked.
        chance: the same after those that have been.
    """

    guess: float
    chance: float

    def drafts(self, most: int, cost: Cost) -> int:
        """The number of drafts, up to `most`, with the most tokens for the time that they take."""
        best, count, expected, right = 1.0, 0, 1.0, 1.0
        for drafts in range(1, most + 1):
            right *= self.chance
            expected += right
            gain = expected / cost(1 + drafts)
            if gain > best:
                best, count = gain, drafts
        return count

    def skip(self) -> None:
        """Note that drafts could have been made and were not, so that they are tried again."""
        self.chance += FORGET * (self.guess - self.chance)

    def note(self, drafted: int, right: int) -> None:
        """Note how many drafts were right; those behind the first wrong one say nothing."""
        for hit in (True,) * right + (False,) * (right < drafted):
            self.chance += NEWEST * (hit - self.chance)


def linear_cost(slope: float) -> Cost:
    """Every token after the first adds `slope` of a step."""
    return lambda tokens: 1 + slope * (tokens - 1)
