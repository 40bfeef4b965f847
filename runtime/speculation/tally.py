"""Counts of drafts that were checked."""

from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass(slots=True)
class Tally:
    """Drafts of a request, or of many.

    Attributes:
        rounds: steps that checked drafts.
        drafted: how many had a draft in the first place, in the second, and so on.
        accepted: how many of these were right, with all before them.
    """

    rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int) -> None:
        """Count a step that checked `drafted` drafts of which `accepted` were right."""
        right = [1] * accepted + [0] * (drafted - accepted)
        self.add(Tally(int(drafted > 0), [1] * drafted, right))

    def add(self, other: "Tally") -> None:
        """Count what another has counted."""
        self.rounds += other.rounds
        self.drafted = _sums(self.drafted, other.drafted)
        self.accepted = _sums(self.accepted, other.accepted)

    @property
    def tokens_a_round(self) -> float | None:
        """Tokens that a step with drafts gave on average; None before the first."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else None


def _sums(a: list[int], b: list[int]) -> list[int]:
    """Sums by place; the shorter list goes on with zeros."""
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
