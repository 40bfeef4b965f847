"""Counts of drafts that were checked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class Speculated:
    """Drafts of a request that has ended, or of several.

    Attributes:
        rounds: steps that verified drafts.
        drafted: drafts by position: how many rounds had a first one, a second one, and so on.
        accepted: how many of them were accepted, which takes all before them to be.
        tokens_a_round: mean number of tokens that a round gave, or would have given behind a stop
            token that was drafted; None without rounds.
    """

    rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens_a_round: float | None

    @property
    def words(self) -> str:
        """`3.1 tokens a round`; empty without rounds."""
        return "" if self.tokens_a_round is None else f"{self.tokens_a_round:.1f} tokens a round"


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

    def add(self, other: "Tally | Speculated") -> None:
        """Count what another has counted."""
        self.rounds += other.rounds
        self.drafted = _sums(self.drafted, other.drafted)
        self.accepted = _sums(self.accepted, other.accepted)

    @property
    def tokens_a_round(self) -> float | None:
        """Tokens that a step with drafts gave on average; None before the first."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else None

    @property
    def speculated(self) -> Speculated:
        """The counts so far."""
        counts = self.rounds, tuple(self.drafted), tuple(self.accepted)
        return Speculated(*counts, self.tokens_a_round)


def _sums(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """Sums by place; the shorter list goes on with zeros."""
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
