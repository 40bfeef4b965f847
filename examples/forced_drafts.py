"""Drafters that know the output of plain decoding, so that acceptance can be forced.

For scripts that measure what speculation costs, with random weights or real ones.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowbit.runtime.engine.head_drafts import HeadDrafts
from lowbit.runtime.speculation.costs import Costs
from lowbit.runtime.speculation.drafter import NgramDrafter
from lowbit.runtime.speculation.pace import Cost

ACCEPTED = ("none", "half", "all")


class NoCosts(Costs):
    """Costs by which a model's head always makes as many drafts as it may."""

    def drafting(self, sequences: int) -> Cost:
        return lambda drafts: 1 / (1 + drafts)


@dataclass
class Known:
    """Proposes k drafts of a known output, of which so many are right, and then a wrong one.

    Attributes:
        truth: the output.
        k: drafts.
        accepted: none, half or all; half of an odd number by turns.
        vocabulary: real tokens.
        at: tokens of the output so far.
        turn: rounds so far.
    """

    truth: Sequence[int]
    k: int
    accepted: str
    vocabulary: int
    at: int = 0
    turn: int = 0

    def append(self, id: int) -> None:
        self.at += 1

    def propose(self, most: int, cost: Cost | None = None, least_gain: float = 1.0) -> list[int]:
        drafts = list(self.truth[self.at : self.at + min(self.k, most)])
        half = (self.k + self.turn % 2) // 2
        right = {"none": 0, "half": half, "all": self.k}[self.accepted]
        if right < len(drafts):
            drafts[right] = (drafts[right] + 1) % self.vocabulary
        self.turn += 1
        return drafts

    def note(self, drafted: int, right: int) -> None:
        pass


@dataclass
class Copied:
    """N-gram drafts of lines that are repeated, with the tokens of a known output in their place.

    The search, the chosen number of drafts and their acceptance are those of a text that says the
    lines again.

    Attributes:
        truth: the output.
        lines: the prompt, which the text repeats.
        ngram: over the text.
        vocabulary: real tokens.
        at: tokens of the output so far.
    """

    truth: Sequence[int]
    lines: Sequence[int]
    ngram: NgramDrafter
    vocabulary: int
    at: int = 0

    def append(self, id: int) -> None:
        self.ngram.append(self.lines[self.at % len(self.lines)])
        self.at += 1

    def propose(self, most: int, cost: Cost, least_gain: float) -> list[int]:
        found = self.ngram.propose(most, cost, least_gain)
        text = [self.lines[(self.at + place) % len(self.lines)] for place in range(len(found))]
        truth = self.truth[self.at : self.at + len(found)]
        return [
            right if copied == said else (right + 1) % self.vocabulary
            for right, copied, said in zip(truth, found, text, strict=False)
        ]

    def note(self, drafted: int, right: int) -> None:
        self.ngram.note(drafted, right)


@dataclass
class TimedHead:
    """A model's head whose drafts take their time, and may be replaced by known ones.

    Attributes:
        head: of the model.
        known: gives drafts of the next round in place of the head's; None for the head's.
        seconds: of all drafts so far.
    """

    head: HeadDrafts
    known: Known | None
    seconds: float = 0.0

    def read_prompt(self, *arguments: Any) -> None:
        self.head.read_prompt(*arguments)

    def propose(self, sequences: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        started = time.perf_counter()
        found = self.head.propose(sequences, counts)  # the host waits for it
        self.seconds += time.perf_counter() - started
        if self.known is None:
            return found
        self.known.at = len(sequences[0].output)
        return [self.known.propose(max(counts))]
