"""Packs: chunks of several prompts that pass the layers together on a GPU.

Linears take nearly as long for some tokens as for many, so that short prompts one by one leave most
of a GPU unused. Bits: a token has those that it has where its prompt's chunk passes alone.
Attention and recurrence take each sequence for itself. Linears do so for any number of tokens
where activations have eight bits, else for up to EXACT_TOKENS: beyond, how they split their sums
depends on it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.thresholds import EXACT_TOKENS, PACK_SEQUENCES, SEQUENCE_TOKENS

# Tokens of a prompt that the cache will have from one that runs, beyond what it has: so many are
# worth waiting for
SHARED = 64


@dataclass(slots=True)
class Chunk:
    """Chunks of prompts that are on their way through the layers together, most often one."""

    sequences: list[Sequence]  # whose prompts they are
    stops: list[int]  # lengths of the sequences behind them
    layers: Iterator[Tensor]  # runs a layer for each output that is taken
    # The last output; empty before the first
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(slots=True)
class Pack:
    """Sequences whose next chunks pass the layers together."""

    most: int  # tokens
    most_keys: int | None  # of all sequences, those of the chunks included; None for any number
    # Tokens left of prompts beside the first one, from which on none is given room: whoever asks
    # later waits for these, even if it were the turn of that client
    most_left: int
    sequences: list[Sequence] = field(default_factory=list)
    _tokens: int = 0  # of their chunks
    _keys: int = 0  # behind them
    _left: int = 0  # of prompts that do not fit, and a share of what lies behind the others' chunks

    def fill(
        self, prompts: list[Sequence], open_beside: Callable[[], Sequence | None]
    ) -> list[Sequence]:
        """Take the first of the sequences whose prompts run, and those that fit beside it.

        Args:
            prompts: these sequences; a longer list once another one has been opened.
            open_beside: gives room to another sequence that waits; None if it has to wait.

        Returns:
            Those that have been taken.
        """
        for each in prompts:
            self._take(each)
        while self._has_room and len(prompts) < PACK_SEQUENCES:
            opened = open_beside()
            if opened is None:
                break
            self._take(opened)  # or a later pack does, see `_left`
        return self.sequences

    @property
    def _has_room(self) -> bool:
        """True if another sequence may fit, and not too much is left of those that have room."""
        room = self._tokens < self._limit and self._left < self.most_left
        return room and packable(self.sequences[0])

    @property
    def _limit(self) -> int:
        """Most tokens of chunks of the first one's kind; short ones are few, see `is_short`."""
        return min(self.most, EXACT_TOKENS) if is_short(self.sequences[0]) else self.most

    def _take(self, sequence: Sequence) -> None:
        """Take the first sequence, or one that fits beside it."""
        count = sequence.next_count
        tokens, keys = self._tokens + count, self._keys + sequence.next_stop
        if self.sequences:
            first = self.sequences[0]
            alike = is_short(sequence) == is_short(first)
            fits = tokens <= self._limit and len(self.sequences) < PACK_SEQUENCES
            if self.most_keys is not None:
                fits = fits and keys <= self.most_keys
            if not (alike and fits and packable(first) and packable(sequence)):
                self._left += len(sequence.request.prompt) - sequence.length
                return
            # Their next chunks pass together, too
            self._left += (len(sequence.request.prompt) - sequence.next_stop) // PACK_SEQUENCES
        self.sequences.append(sequence)
        self._tokens, self._keys = tokens, keys


def is_short(sequence: Sequence) -> bool:
    """True if the next chunk of a sequence's prompt takes the kernels of a decode step."""
    return sequence.next_count <= SEQUENCE_TOKENS


def packable(sequence: Sequence) -> bool:
    """True if a chunk of a sequence's prompt may pass the layers beside others."""
    return sequence.images is None and sequence.request.prompt_logprobs is None


def awaited(
    sequence: Sequence, others: list[Sequence], known: Callable[[Sequence], int]
) -> Sequence | None:
    """Running sequence whose prompt a waiting one shares, and should wait for.

    Args:
        sequence: whose prompt waits, see `packable`.
        others: sequences whose prompts run.
        known: tokens of its prompt that the prefix cache has.

    Returns:
        The first that will bring enough shared tokens into the cache; None if none will.
    """
    alike = [each for each in others if _begin_alike(sequence, each, SHARED)]
    if not alike:
        return None
    least = SHARED + known(sequence)
    for each in alike:
        coming = next((end for end in each.chunk_ends if end >= least), None)
        if coming is not None and _begin_alike(sequence, each, coming):
            return each
    return None


def _begin_alike(waiting: Sequence, running: Sequence, count: int) -> bool:
    """True if a prompt that waits could reuse `count` tokens of another one, both of text alone."""
    one, other = waiting.request, running.request
    if count >= len(one.prompt) or one.salt != other.salt:  # its last token runs in any case
        return False
    return one.prompt[:count] == other.prompt[:count]
