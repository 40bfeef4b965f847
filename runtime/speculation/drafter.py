"""Drafters: what proposes the next tokens of one sequence."""

from collections.abc import Callable, Sequence
from typing import Protocol

from lowbit.runtime.speculation.ngram import GrowingText, Match
from lowbit.runtime.speculation.pace import Cost, Pace

# Chance that a draft is right, by the least length of the match that it follows; before any of
# the sequence has been checked.
GUESSES = {12: 0.9, 6: 0.75, 3: 0.5}


class Drafter(Protocol):
    """Proposes tokens of one sequence; called on the engine's thread, in order."""

    def append(self, id: int) -> None:
        """Take the next token of the sequence."""

    def propose(self, most: int, cost: Cost, least_gain: float) -> Sequence[int]:
        """Up to `most` tokens that may come next; none where others promise more.

        Args:
            most: tokens.
            cost: of checking them.
            least_gain: of others, see `Plan`.
        """

    def note(self, drafted: int, right: int) -> None:
        """Learn how many of the tokens that were proposed last were checked, and were right."""


NewDrafter = Callable[[Sequence[int]], Drafter]  # of a sequence that begins with these tokens


class NgramDrafter:
    """Copies what followed where the end of the text stood before."""

    def __init__(self, ids: Sequence[int]) -> None:
        """Of a sequence that begins with these tokens."""
        self._text = GrowingText(ids)
        self._paces = {least: Pace(chance) for least, chance in GUESSES.items()}
        self._used: Pace | None = None

    def append(self, id: int) -> None:
        """Take the next token of the sequence."""
        self._text.append(id)

    def propose(self, most: int, cost: Cost, least_gain: float = 1.0) -> Sequence[int]:
        """What followed the longest match; see `Drafter.propose`."""
        match = self._text.match() if most > 0 else None
        if match is None:
            return ()
        pace = self._pace(match)
        plan = pace.plan(most, cost)
        if plan.gain <= least_gain:
            pace.skip()
            return ()
        self._used = pace
        return self._text.following(match, plan.drafts)

    def note(self, drafted: int, right: int) -> None:
        """Learn how many drafts were right."""
        if self._used is not None:
            self._used.note(drafted, right)

    def _pace(self, match: Match) -> Pace:
        return next(pace for least, pace in self._paces.items() if match.length >= least)
