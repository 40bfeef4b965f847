"""Inputs of rounds with drafts, which a round updates for the next one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.runtime.state.host_rings import new_ring
from lowbit.runtime.thresholds import ROUND_TOKENS

TRAIL = 128  # positions of a row whose hidden states are kept
# At least a number more than tokens, for the end of the last sequence; so many, since Triton
# specializes kernels for tensors that begin at multiples of 16 bytes: here all rows do.
PADDING = 4


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
        numbers: [13, W + PADDING] int32, all that the host writes for the first round, in one copy:
            `block`, `seen`, `seen_rows`, `seen_starts`, then what `behind` takes.
        block: [7, W + PADDING] int32: ids, positions, rows, reads, writes, places, starts.
        ids: [W + PADDING] int32, the tokens.
        positions: [W + PADDING] int32 of them.
        rows: [W + PADDING] int32 of their sequences.
        reads: [W + PADDING] int32, slot with the recurrent state before the first token, by
            sequence.
        writes: [W + PADDING] int32, slot that takes the state after the token.
        places: [W + PADDING] int32 of the tokens, counted from the first of each sequence.
        starts: [W + PADDING] int32, the first token of each sequence, then of padding, then the
            number of all tokens.
        seen: [W + PADDING] int32, positions of the tokens in the round before.
        seen_rows: [W + PADDING] int32, their rows.
        seen_starts: [W + PADDING] int32, the first of each sequence, then the number of all.
        behind: [3, W + PADDING] int64: chosen, trails, ends.
        chosen: [W + PADDING] int64, what the model has chosen behind each token.
        trails: [W + PADDING] int64, where the hidden states of `seen` are, see `trail_of`.
        ends: [W + PADDING] int64, by sequence, index in the round of the last token that was right.
        wrong: [W] int32, row of each token whose draft was wrong or stood behind a wrong one; else
            SCRATCH.
        right: [RING, R] int64 on the host, page-locked beside a GPU: drafts of a row that were
            right, by the position of the first token of the round modulo RING.
    """

    numbers: Tensor
    block: Tensor
    ids: Tensor
    positions: Tensor
    rows: Tensor
    reads: Tensor
    writes: Tensor
    places: Tensor
    starts: Tensor
    seen: Tensor
    seen_rows: Tensor
    seen_starts: Tensor
    behind: Tensor
    chosen: Tensor
    trails: Tensor
    ends: Tensor
    wrong: Tensor
    right: Tensor


def new_round_inputs(rows: int, device: torch.device) -> RoundInputs:
    """Tensors for the rounds of so many rows, all zero."""
    wide = ROUND_TOKENS + PADDING
    numbers = torch.zeros(13, wide, dtype=torch.int32, device=device)
    behind = torch.zeros(3, wide, dtype=torch.int64, device=device)
    wrong = torch.zeros(ROUND_TOKENS, dtype=torch.int32, device=device)
    right = new_ring(rows, device.type == "cuda")
    return RoundInputs(*(numbers, numbers[:7], *numbers[:10], behind, *behind, wrong, right))
