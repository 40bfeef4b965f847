"""Drafts copied from the text so far: what followed where its end stood before.

The idea is prompt lookup decoding (A. Saxena, 2023); the longest match wins, of equals the last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lowbit.runtime.speculation.pace import Cost, Pace

LEAST_MATCH = 3  # tokens; shorter ones are found in any text
LONGEST_MATCH = 16  # tokens that are compared
# Chance that a draft is right, by the least length of the match that it follows; before any of
# the sequence has been checked.
GUESSES = {12: 0.9, 6: 0.75, 3: 0.5}


class Drafter(Protocol):
    """Proposes tokens of one sequence; called on the engine's thread, in order."""

    def append(self, id: int) -> None:
        """Take the next token of the sequence."""

    def propose(self, most: int, cost: Cost, least_gain: float) -> Sequence[int]:
        """Up to `most` tokens that may come next; none where others promise more.

        Asking changes nothing.

        Args:
            most: tokens.
            cost: of checking them.
            least_gain: of others, see `Plan`.
        """

    def note(self, drafted: int, right: int) -> None:
        """Learn how many of the tokens proposed here were checked, and how many were right."""

    def skip(self) -> None:
        """Note that a step went by without drafts from here, so that they are tried again."""


NewDrafter = Callable[[Sequence[int]], Drafter]  # of a sequence that begins with these tokens


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
        """Note that nothing was copied from behind the present match."""
        match = self._text.match()
        if match is not None:
            self._pace(match).skip()

    def _pace(self, match: "Match") -> Pace:
        return next(pace for least, pace in self._paces.items() if match.length >= least)


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier place in a text that ends as the text does.

    Attributes:
        length: tokens that are the same, at most LONGEST_MATCH.
        stop: the place behind them.
    """

    length: int
    stop: int


class GrowingText:
    """Token ids of a sequence, in which its end is looked for."""

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
        """The place that ends as the text does with the most tokens; None below LEAST_MATCH."""
        if self._found[0] != self._length:
            self._found = self._length, self._search()
        return self._found[1]

    def _search(self) -> Match | None:
        ids = self._ids[: self._length]
        places = np.flatnonzero(ids[:-1] == ids[-1])  # of the last token that is the same
        length = 1
        while length < LONGEST_MATCH:
            before = places[places >= length]
            longer = before[ids[before - length] == ids[-1 - length]] if len(before) else before
            if not len(longer):
                break
            places, length = longer, length + 1
        return Match(length, int(places[-1]) + 1) if length >= LEAST_MATCH else None

    def following(self, match: Match, count: int) -> list[int]:
        """The tokens behind a match, as many as wanted: those before the end repeat behind it."""
        period = self._length - match.stop
        places = match.stop + np.arange(count) % period
        return [int(id) for id in self._ids[places]]
