"""Packs: chunks of several prompts that pass the layers together on a GPU.

Linears take nearly as long for some tokens as for many, so that short prompts one by one leave most
of a GPU unused. Bits: a token has those that it has where its prompt's chunk passes alone.
Attention and recurrence take each sequence for itself. Linears do so for any number of tokens
where activations have eight bits, else for up to EXACT_TOKENS: beyond, how they split their sums
depends on it.
"""

import math
from collections import deque
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


@dataclass(frozen=True, slots=True)
class PackLimits:
    """Sizes that the chunks of a pack fit."""

    tokens: int
    keys: int | None  # of all sequences, those of the chunks included; None for any number
    # Tokens left of prompts beside the first one, from which on none is given room: whoever asks
    # later waits for these, even if it were the turn of that client
    left: int


def fill_pack(
    prompts: list[Sequence], limits: PackLimits, open_beside: Callable[[], Sequence | None]
) -> list[Sequence]:
    """The first sequence and those whose next chunks fit beside its own, opened ones included.

    Args:
        prompts: sequences whose prompts run, at least one.
        open_beside: gives room to another sequence that waits; None if it has to wait.
    """
    first, *rest = prompts
    if not packable(first):
        return [first]
    most = min(limits.tokens, EXACT_TOKENS) if is_short(first) else limits.tokens
    most_keys = math.inf if limits.keys is None else limits.keys
    pack, tokens, keys = [first], first.next_count, first.next_stop
    left = 0  # of prompts that do not fit, and a share of what lies behind the others' chunks
    others, seen = deque(rest), 1
    while others or (seen < PACK_SEQUENCES and tokens < most and left < limits.left):
        each = others.popleft() if others else open_beside()
        if each is None:
            break
        seen += 1
        count, stop = each.next_count, each.next_stop
        fits = len(pack) < PACK_SEQUENCES and tokens + count <= most and keys + stop <= most_keys
        if fits and packable(each) and is_short(each) == is_short(first):
            pack.append(each)
            tokens, keys = tokens + count, keys + stop
            # Their next chunks pass together, too
            left += (len(each.request.prompt) - stop) // PACK_SEQUENCES
        else:
            left += len(each.request.prompt) - each.length
    return pack


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
