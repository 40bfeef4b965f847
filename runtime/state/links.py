"""Tensors by which rounds follow each other: what one leaves is where the next one begins."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.runtime.state.posted import PLACES
from lowbit.runtime.state.sampler_rows import SCRATCH


@dataclass(frozen=True, slots=True)
class Links:
    """Inputs of a round of B sequences with k drafts each, and what it leaves for the next one.

    Token j of sequence b is number b * (k + 1) + j: the last token, then its drafts. All tensors
    are on the device but `right`.

    Attributes:
        ids: [W] int64, the tokens.
        positions: [W] int32 of them.
        rows: [W] int32 of their sequences.
        reads: [W] int32, slot with the recurrent state before the first token, by sequence.
        writes: [W] int32, slot that takes the state after the token.
        chosen: [W] int64, what the model chose behind each token.
        seen: [W] int32, positions of the tokens in the round before.
        ends: [W] int64, number of the last of these that was right, by sequence.
        wrong: [W] int32, row of each token whose draft was wrong or stood behind a wrong one; else
            SCRATCH.
        right: [PLACES, R] int64 on the host, page-locked beside a GPU: drafts of a row that were
            right, by the position of the first token of the round modulo PLACES.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    reads: Tensor
    writes: Tensor
    chosen: Tensor
    seen: Tensor
    ends: Tensor
    wrong: Tensor
    right: Tensor

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """Tensors that a round changes, beside ids and what a step changes anyway."""
        return self.chosen, self.seen, self.ends


def accept(links: Links, B: int, k: int) -> None:
    """Find the drafts that were right and begin the next round behind them; see `Ops.accept`."""
    count = B * (k + 1)
    ids, chosen = (each[:count].view(B, k + 1) for each in (links.ids, links.chosen))
    rows, writes = (each[:count].view(B, k + 1) for each in (links.rows, links.writes))
    positions, places = links.positions[:count].view(B, k + 1), torch.arange(k + 1)
    right = (ids[:, 1:] == chosen[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    here = torch.arange(B), right
    first = positions[:, 0] - (rows[:, 0] != SCRATCH).int()  # choosing has moved them on
    links.right[first.long() % PLACES, rows[:, 0].long()] = right
    links.seen[:count] = (first[:, None] + places).flatten()
    links.ends[:B] = torch.arange(B) * (k + 1) + right
    links.wrong[:count] = torch.where(places > right[:, None], rows, SCRATCH).flatten()
    links.reads[:B] = writes[here]
    ids[:, 0] = chosen[here]
    positions.copy_(first[:, None] + (1 + right[:, None] + places) * (rows != SCRATCH))
