"""N-gram drafts: copies of what followed the same tokens earlier.

They copy what followed where the end of the text stood before (prompt lookup decoding, A. Saxena,
2023); the longest match wins, of equals the last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

NEWEST = 0.15  # weight of the newest checked copy in a rate
FORGET = 0.005  # part of the way back to the first guess, for every step without copies
LEAST_MATCH = 3  # tokens; shorter matches are found in any text
LONGEST_MATCH = 16  # tokens that are compared
# First guess of the acceptance rate, by the least length of the match that a copy follows.
GUESSES = {12: 0.9, 6: 0.75, 3: 0.5}


class Drafter(Protocol):
    """Drafts for one sequence; called on the engine's thread, in order."""

    @property
    def match_length(self) -> int:
        """Tokens of the match that proposals follow; 0 without one."""

    def append(self, id: int) -> None:
        """Take the next token of the sequence."""

    def propose(self, most: int) -> tuple[Sequence[int], float]:
        """Up to `most` tokens that may come next, and how often such a token is accepted.

        A query, which changes nothing.
        """

    def note(self, drafted: int, accepted: int) -> None:
        """Learn how many of the proposed tokens were checked, and how many were accepted."""

    def skip(self) -> None:
        """Note a step without proposals from here, so that they are tried again."""


NewDrafter = Callable[[Sequence[int]], Drafter]  # from the first tokens of a sequence


class NgramDrafter:
    """Copies what followed where the end of the text stood before."""

    def __init__(self, ids: Sequence[int]) -> None:
        """Begin with the tokens of a prompt."""
        self._text = GrowingText(ids)
        self._rates = dict(GUESSES)

    @property
    def match_length(self) -> int:
        """Tokens of the match that proposals follow; 0 without one."""
        match = self._text.match()
        return 0 if match is None else match.length

    def append(self, id: int) -> None:
        """Take the next token of the sequence."""
        self._text.append(id)

    def propose(self, most: int) -> tuple[Sequence[int], float]:
        """Tokens that followed the longest match; see `Drafter.propose`."""
        match = self._text.match()
        if match is None or most == 0:
            return (), 0.0
        return self._text.following(match, most), self._rates[_least(match)]

    def note(self, drafted: int, accepted: int) -> None:
        """Learn how many copies behind the present match were accepted.

        Those behind the first wrong one say nothing.
        """
        for hit in (True,) * accepted + (False,) * (accepted < drafted):
            self._learn(NEWEST, float(hit))

    def skip(self) -> None:
        """Note that nothing behind the present match was proposed: its rate nears the guess."""
        self._learn(FORGET)

    def _learn(self, weight: float, towards: float | None = None) -> None:
        match = self._text.match()
        if match is not None:
            least = _least(match)
            target = GUESSES[least] if towards is None else towards
            self._rates[least] += weight * (target - self._rates[least])


def _least(match: "Match") -> int:
    """Key of `GUESSES` for a match."""
    return next(least for least in GUESSES if match.length >= least)


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the text's last tokens."""

    length: int  # tokens of the match, at most LONGEST_MATCH
    stop: int  # index behind the match


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
