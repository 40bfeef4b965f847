"""Inputs of rounds with drafts, which a round updates for the next one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.runtime.state.host_rings import new_ring
from lowbit.runtime.thresholds import ROUND_TOKENS

TRAIL = 128  # positions of a row whose hidden states are kept


def trail_of(row: int, position: int) -> int:
    """Index of a position's hidden state in the trails, of TRAIL positions a row."""
    return row * TRAIL + position % TRAIL


def new_trail(rows: int, hidden: int, dtype: torch.dtype, device: str) -> Tensor:
    """Hidden states of the last positions of each row, zeros: [R, TRAIL, h]."""
    return torch.zeros(rows, TRAIL, hidden, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """Inputs of a round, W = ROUND_TOKENS tokens at most, and what it leaves for the next one.

    A round that follows another has B sequences with k drafts each: token j of sequence b is number
    b * (k + 1) + j, the last token first, then its drafts. All tensors are on the device but
    `right`.

    Attributes:
        block: [7, W + 1] int32: ids, positions, rows, reads, writes, places, starts.
        ids: [W + 1] int32, the tokens.
        positions: [W + 1] int32 of them.
        rows: [W + 1] int32 of their sequences.
        reads: [W + 1] int32, slot with the recurrent state before the first token, by sequence.
        writes: [W + 1] int32, slot that takes the state after the token.
        places: [W + 1] int32 of the tokens, counted from the first of each sequence.
        starts: [W + 1] int32, the first token of each sequence, then of padding, then the number of
            all tokens.
        chosen: [W] int64, what the model has chosen behind each token.
        seen: [W] int32, positions of the tokens in the round before.
        trails: [W] int64, where the hidden states of these are, see `trail_of`.
        ends: [W] int64, by sequence, index in the round of the last token that was right.
        wrong: [W] int32, row of each token whose draft was wrong or stood behind a wrong one; else
            SCRATCH.
        right: [RING, R] int64 on the host, page-locked beside a GPU: drafts of a row that were
            right, by the position of the first token of the round modulo RING.
    """

    block: Tensor
    ids: Tensor
    positions: Tensor
    rows: Tensor
    reads: Tensor
    writes: Tensor
    places: Tensor
    starts: Tensor
    chosen: Tensor
    seen: Tensor
    trails: Tensor
    ends: Tensor
    wrong: Tensor
    right: Tensor


def new_round_inputs(rows: int, device: torch.device) -> RoundInputs:
    """Tensors for the rounds of so many rows, all zero."""
    block = torch.zeros(7, ROUND_TOKENS + 1, dtype=torch.int32, device=device)
    chosen, trails, ends = torch.zeros(3, ROUND_TOKENS, dtype=torch.int64, device=device)
    seen, wrong = torch.zeros(2, ROUND_TOKENS, dtype=torch.int32, device=device)
    right = new_ring(rows, device.type == "cuda")
    return RoundInputs(*(block, *block, chosen, seen, trails, ends, wrong, right))
