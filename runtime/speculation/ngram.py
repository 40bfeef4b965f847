"""Drafts copied from the text so far: what followed where its end stood before.

The idea is prompt lookup decoding (A. Saxena, 2023); the longest match wins, of equals the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_MATCH = 3  # tokens; shorter ones are found in any text
LONGEST_MATCH = 16  # tokens that are compared


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
