"""The end of what makes drafts: a final norm, and the target's head or some of its rows."""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lowbit.runtime.backends.ops import Ops
from lowbit.runtime.models.selected_rows import SelectedRows
from lowbit.runtime.state.sampler import SamplerRows

W = TypeVar("W")  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class DraftOutput(Generic[W]):
    """Chooses drafts by the last hidden states of a head or a drafter."""

    ops: Ops[W]
    norm: Tensor  # [h] gain of the final norm
    eps: float  # of the norm
    head: W  # [V, h], of the target
    vocabulary: int  # V of the target
    rows: SelectedRows[W] | None = None  # that drafts are chosen from; None for all

    def choose(
        self,
        hidden: Tensor,
        sampler: SamplerRows,
        rows: Tensor,
        positions: Tensor,
        token: Tensor,
        ring: Tensor,
    ) -> None:
        """Choose a draft by each of B hidden states; see `Ops.choose`.

        Args:
            hidden: [B, h], before the final norm.
            sampler: of the target.
            rows: [B] int32.
            positions: [B] int32 of the tokens behind which the drafts stand; one is added.
            token: [B] int64, written.
            ring: for what `choose` leaves to the host.
        """
        self.choose_by(self.logits(hidden), sampler, rows, positions, token, ring)

    def choose_by(
        self,
        logits: Tensor,
        sampler: SamplerRows,
        rows: Tensor,
        positions: Tensor,
        token: Tensor,
        ring: Tensor,
    ) -> None:
        """Choose a draft by each row of logits [B, N or more]; see `choose` and `logits`."""
        ops = self.ops
        if self.rows is None:
            ops.choose(logits, sampler, rows, positions, token, ring)
            return
        if sampler.shape.adjusted:  # which looks at each token of the model
            ops.choose(self.spread(logits), sampler, rows, positions, token, ring)
            return
        # ids ascend, so that of equal logits the lower token is chosen
        own = replace(sampler, vocabulary=self.candidates)
        ops.choose(logits, own, rows, positions, token, ring, ids=self.rows.ids)

    @property
    def candidates(self) -> int:
        """N, tokens that drafts are chosen from."""
        return self.vocabulary if self.rows is None else len(self.rows.ids)

    def ids_of(self, columns: Tensor) -> Tensor:
        """Tokens of columns [M] of logits: [M]."""
        if self.rows is None:
            return columns
        return self.ops.embed(columns, self.rows.ids[:, None])[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [M, h] to [M, N or more] float32, a column for each candidate."""
        head = self.head if self.rows is None else self.rows.head
        return self.ops.product(hidden, head, norm=self.norm, eps=self.eps, logits=True)

    def spread(self, logits: Tensor) -> Tensor:
        """Logits of all tokens, [M, V]; those that are no candidates get -inf."""
        if self.rows is None:
            return logits
        shape = len(logits), self.vocabulary
        wide = torch.full(shape, -torch.inf, dtype=logits.dtype, device=logits.device)
        return wide.index_copy_(1, self.rows.ids, logits[:, : self.candidates])
