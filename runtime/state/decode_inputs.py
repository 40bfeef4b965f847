"""Inputs of decode steps, plain ones and rounds with drafts, which a step updates for the next."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.runtime.state.host_rings import new_ring, write_rows
from lowbit.runtime.state.step import Span
from lowbit.runtime.state.step_buffers import (
    COLUMNS,
    PADDING,
    StepBuffers,
    buffers_in,
    columns_of,
)
from lowbit.runtime.thresholds import ROUND_TOKENS

HIDDEN_RING = 128  # positions of a row whose hidden states are kept
KNOWN, FIRSTS = 3, 4  # rows of `DecodeInputs.longs`
HEAD_COLUMNS = 6  # of `DecodeInputs.numbers`: what a round begins with whose drafts a head makes


def ring_place(row: int, position: int) -> int:
    """Index of a position's hidden state in the hidden rings, of HIDDEN_RING positions a row."""
    return row * HIDDEN_RING + position % HIDDEN_RING


def new_hidden_ring(rows: int, hidden: int, dtype: torch.dtype, device: str) -> Tensor:
    """Hidden states of the last positions of each row, zeros: [R, HIDDEN_RING, h]."""
    return torch.zeros(rows, HIDDEN_RING, hidden, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode step of W - PADDING tokens at most, and what it leaves for the next one.

    A plain step takes one token of each sequence from `chosen`, and writes the next one there.

    A round that follows another has B sequences with k drafts each: token j of sequence b is number
    b * (k + 1) + j, the last token first, then its drafts. All tensors are on the device but
    `right`.
    """

    # [1 + COLUMNS + HEAD_COLUMNS, W] int32, all that the host writes: `origins`, those of `step`,
    # `seen`, `seen_rows`, `seen_starts`, then what the first three `longs` take
    numbers: Tensor
    # [W] int32, where the token of each sequence of a plain step is found in `longs`
    origins: Tensor
    step: StepBuffers  # tokens, positions, sequences and slots
    seen: Tensor  # [W] int32, positions of the tokens in the round before
    seen_rows: Tensor  # [W] int32, their rows
    seen_starts: Tensor  # [W] int32, the first of each sequence, then the number of all
    longs: Tensor  # [5, W] int64: `chosen`, `ring_places`, `ends`, `known`, `firsts`
    chosen: Tensor  # [W] int64, what the model has chosen behind each token
    ring_places: Tensor  # [W] int64, where the hidden states of `seen` are, see `ring_place`
    ends: Tensor  # [W] int64, by sequence, index in the round of the last token that was right
    known: Tensor  # [W] int64, tokens of a plain step that the host knows
    firsts: Tensor  # [W] int64 by row, token of a sequence that was not in the last plain step
    # [W] int32, row of each token whose draft was wrong or stood behind a wrong one; else SCRATCH
    wrong: Tensor
    # [RING, R] int64 on the host, page-locked beside a GPU: drafts of a row that were right, by the
    # position of the first token of the round modulo RING
    right: Tensor

    def write_plain(
        self,
        spans: Sequence[Span],
        known: Sequence[int | None],
        before: Sequence[int | None],
        M: int,
    ) -> None:
        """Write the inputs of a plain step, padded to M tokens, without waiting.

        Args:
            known: token of each; None where it is on the device.
            before: place of each in the last plain step, which has left its token in `chosen`; None
                where that is in `firsts`.
        """
        wide = self.longs.shape[1]
        origins = []
        for place, (span, token, at) in enumerate(zip(spans, known, before, strict=True)):
            if token is not None:
                origins.append(KNOWN * wide + place)
            else:
                origins.append(FIRSTS * wide + span.row if at is None else at)
        ids = [token or 0 for token in known]
        columns = columns_of(spans, ids, M, plain=True)
        write_rows(self.numbers[: 1 + COLUMNS], (origins, *columns))
        if any(token is not None for token in known):
            self.known.copy_(self.step.ids)
        self.chosen.copy_(self.longs.view(-1).index_select(0, self.origins))

    def write_round(
        self, spans: Sequence[Span], ids: Sequence[int], M: int, head: Sequence[Sequence[int]] = ()
    ) -> None:
        """Write the inputs of a round, padded to M tokens, without waiting; see `columns_of`.

        head: for a round whose drafts the head makes, the rows of `numbers` behind those of `step`.
        """
        if not head:
            self.step.write(spans, ids, M)
            return
        write_rows(self.numbers[1:], (*columns_of(spans, ids, M), *head))
        self.longs[:3].copy_(self.numbers[-3:])


def new_decode_inputs(tokens: int, rows: int, device: torch.device) -> DecodeInputs:
    """Zeros for plain steps of so many tokens, for rounds, and for so many rows of the sampler."""
    wide = max(tokens, ROUND_TOKENS) + PADDING
    numbers = torch.zeros(1 + COLUMNS + HEAD_COLUMNS, wide, dtype=torch.int32, device=device)
    longs = torch.zeros(5, wide, dtype=torch.int64, device=device)
    seen = numbers[1 + COLUMNS :][:3]
    wrong = torch.zeros(ROUND_TOKENS, dtype=torch.int32, device=device)
    right = new_ring(rows, device.type == "cuda")
    step = buffers_in(numbers[1 : 1 + COLUMNS])
    tensors = (numbers, numbers[0], step, *seen, longs, *longs, wrong, right)
    return DecodeInputs(*tensors)
