"""Drafters that know the output of plain decoding, so that acceptance can be forced.

For scripts that measure what speculation costs, with random weights or real ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.runtime.engine.draft.block import BlockRounds
from lowbit.runtime.engine.draft.made import MadeRounds
from lowbit.runtime.engine.draft.mtp import MtpRounds
from lowbit.runtime.engine.draft.ngram import NgramDrafter

ACCEPTED = ("none", "half", "all")


@dataclass
class Known:
    """Proposes k drafts of a known output, of which so many are right, and then a wrong one."""

    truth: Sequence[int]  # the output
    k: int  # drafts
    accepted: str  # none, half or all; half of an odd number by turns
    vocabulary: int  # real tokens
    at: int = 0  # tokens of the output so far
    turn: int = 0  # rounds so far
    match_length: int = 0  # its drafts join no made ones

    def append(self, id: int) -> None:
        self.at += 1

    def propose(self, most: int) -> tuple[list[int], float]:
        drafts = list(self.truth[self.at : self.at + min(self.k, most)])
        half = (self.k + self.turn % 2) // 2
        right = {"none": 0, "half": half, "all": self.k}[self.accepted]
        if right < len(drafts):
            drafts[right] = (drafts[right] + 1) % self.vocabulary
        self.turn += 1
        return drafts, 1.0

    def note(self, drafted: int, right: int) -> None:
        pass

    def skip(self) -> None:
        pass


@dataclass
class Copied:
    """N-gram drafts of lines that are repeated, with the tokens of a known output in their place.

    The search, the chosen number of drafts and their acceptance are those of a text that says the
    lines again.
    """

    truth: Sequence[int]  # the output
    lines: Sequence[int]  # the prompt, which the text repeats
    ngram: NgramDrafter  # over the text
    vocabulary: int  # real tokens
    at: int = 0  # tokens of the output so far
    match_length: int = 0  # its drafts join no made ones

    def append(self, id: int) -> None:
        self.ngram.append(self.lines[self.at % len(self.lines)])
        self.at += 1

    def propose(self, most: int) -> tuple[list[int], float]:
        found, rate = self.ngram.propose(most)
        text = [self.lines[(self.at + place) % len(self.lines)] for place in range(len(found))]
        truth = self.truth[self.at : self.at + len(found)]
        drafts = [
            right if copied == said else (right + 1) % self.vocabulary
            for right, copied, said in zip(truth, found, text, strict=False)
        ]
        return drafts, rate

    def note(self, drafted: int, right: int) -> None:
        self.ngram.note(drafted, right)

    def skip(self) -> None:
        self.ngram.skip()


@dataclass(slots=True)
class ForcedHead(MtpRounds):
    """Rounds by a model's head, whose drafts are thrown away for those of a known output."""

    truth: "Truth" = field(kw_only=True)

    def draft(self, B: int, k: int, max_kv_len: int) -> Tensor:
        """The head drafts, for the time that it takes."""
        MtpRounds.draft(self, B, k, max_kv_len)
        return self.truth.drafts(self.firsts(B, k)[2], k)


@dataclass(slots=True)
class ForcedBlocks(BlockRounds):
    """Rounds by a block drafter, whose drafts are thrown away for those of a known output."""

    truth: "Truth" = field(kw_only=True)

    def draft(self, B: int, k: int, max_kv_len: int) -> Tensor:
        """The drafter drafts, for the time that it takes."""
        BlockRounds.draft(self, B, k, max_kv_len)
        return self.truth.drafts(self.firsts(B, k)[2], k)


@dataclass(frozen=True)
class Truth:
    """A known output, and how many drafts of a round are right."""

    tokens: Tensor  # by position
    accepted: str  # none, half or all of a round; half of an odd number by turns
    vocabulary: int  # real tokens
    # by number of drafts, those behind every position: made once, so that a round's one kernel more
    # is a lookup
    _tables: dict[int, Tensor] = field(default_factory=dict)

    def drafts(self, first: Tensor, k: int) -> Tensor:
        """Drafts behind the positions `first` [B]: [B, k] int64."""
        if k not in self._tables:
            self._tables[k] = self._all(k)
        return self._tables[k].index_select(0, first)

    def _all(self, k: int) -> Tensor:
        """Drafts behind every position that has as many behind it: [T - k, k] int64."""
        places = torch.arange(k, device=self.tokens.device)
        first = torch.arange(len(self.tokens) - k, device=self.tokens.device)[:, None]
        drafts = self.tokens[first + 1 + places]
        turn = first * 40_503 // 256 % 2  # as good as random
        right = {"none": 0 * first, "half": (k + turn) // 2, "all": 0 * first + k}
        return torch.where(places == right[self.accepted], (drafts + 1) % self.vocabulary, drafts)


def forced_rounds(
    rounds: MadeRounds, prompt: Sequence[int], output: Sequence[int], accepted: str
) -> ForcedHead | ForcedBlocks:
    """Rounds of a sequence whose output after a prompt is known."""
    tokens = torch.tensor([*prompt, *output], device=rounds.runner.state.device)
    truth = Truth(tokens, accepted, rounds.runner.sampler.vocabulary)
    if isinstance(rounds, BlockRounds):
        return ForcedBlocks(rounds.verifier, rounds.blocks, truth=truth)
    if isinstance(rounds, MtpRounds):
        return ForcedHead(rounds.verifier, rounds.cache, truth=truth)
    raise TypeError(f"drafts of {type(rounds).__name__} cannot be forced")
