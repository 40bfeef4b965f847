"""A step on its way, and the tokens that it leaves."""

from collections.abc import Sequence as Numbers
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.state.posted import PLACES


@dataclass(frozen=True, slots=True)
class Flight:
    """A round by the head: the device drafts, checks and accepts without the host.

    Attributes:
        drafts: of each sequence.
        writes: by sequence, slots with the recurrent state after its last token and each draft.
        right: see `Links`.
    """

    drafts: int
    writes: "tuple[tuple[int, ...], ...]"
    right: Tensor


@dataclass(slots=True)
class Sent:
    """A step on its way.

    Attributes:
        sequences: that get tokens from it.
        drafts: that it checks, by sequence; empty where it checks none.
        done: recorded behind the step; None on a CPU, where steps run at once.
        flight: None for other steps.
    """

    sequences: list[Sequence]
    drafts: "Numbers[Numbers[int]]"
    done: "torch.cuda.Event | None"
    flight: Flight | None = None


def chosen_tokens(sent: Sent, places: Tensor) -> list[list[int]]:
    """The next tokens of each sequence of a step; -1 after logits that are not finite.

    A step that has checked drafts gives as many more as were right.

    Args:
        sent: the step, which has been waited for.
        places: where it has left them, see `posted`.
    """
    numbers = places.numpy()  # read one by one, for which a tensor takes 4 us each
    if sent.flight is not None:
        return [_accepted(each, sent.flight, numbers) for each in sent.sequences]
    if not sent.drafts:
        return [[int(numbers[(s.last + 1) % PLACES, s.row])] for s in sent.sequences]
    pairs = zip(sent.sequences, sent.drafts, strict=True)
    return [_tokens(*each, numbers) for each in pairs]


def _tokens(sequence: Sequence, drafts: Numbers[int], places: NDArray[np.int64]) -> list[int]:
    """Tokens chosen behind a sequence's output, up to the first draft that was not chosen."""
    tokens = []
    for position, draft in enumerate((*drafts, None), sequence.last + 1):
        tokens.append(int(places[position % PLACES, sequence.row]))
        if tokens[-1] != draft:
            break
    return tokens


def _accepted(sequence: Sequence, flight: Flight, places: NDArray[np.int64]) -> list[int]:
    """Tokens that a round has put behind a sequence's output."""
    first = sequence.last
    count = 1 + int(flight.right[first % PLACES, sequence.row])
    found = places[[(first + 1 + place) % PLACES for place in range(count)], sequence.row]
    return [int(token) for token in found]
