"""The end of what makes drafts: a final norm, and the target's head or some of its rows."""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lowbit.formats.draft_head import DraftHead
from lowbit.runtime.backends.ops import Ops
from lowbit.runtime.state.sampler import SamplerRows
from lowbit.runtime.weights.linear import PackedLinear
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class DraftRows(Generic[W]):
    """The rows of the target's head that drafts are chosen from."""

    ids: Tensor  # [N] int64, token of every row
    head: W  # [N, h]


@dataclass(frozen=True, slots=True)
class DraftOutput(Generic[W]):
    """Chooses drafts by the last hidden states of a head or a drafter."""

    ops: Ops[W]
    norm: Tensor  # [h] gain of the final norm
    eps: float  # of the norm
    head: W  # [V, h], of the target
    vocabulary: int  # V
    rows: DraftRows[W] | None = None  # that drafts are chosen from; None for all

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
        ops = self.ops
        if self.rows is None or sampler.shape.adjusted:  # these look at each token of the model
            ops.choose(self.logits(hidden), sampler, rows, positions, token, ring)
            return
        some, ids = self._product(hidden, self.rows.head), self.rows.ids
        # ids ascend, so that of equal logits the lower token is chosen
        ops.choose(some, replace(sampler, vocabulary=len(ids)), rows, positions, token, ring)
        token.copy_(ops.embed(token, ids[:, None])[:, 0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [M, h] to [M, V] float32; tokens that are no drafts get -inf."""
        if self.rows is None:
            return self._product(hidden, self.head)
        some = self._product(hidden, self.rows.head)
        shape = len(hidden), self.vocabulary
        logits = torch.full(shape, -torch.inf, dtype=some.dtype, device=some.device)
        return logits.index_copy_(1, self.rows.ids, some)

    def _product(self, hidden: Tensor, head: W) -> Tensor:
        return self.ops.product(hidden, head, norm=self.norm, eps=self.eps, logits=True)


def draft_rows(draft: DraftHead | None, weights: Weights[W]) -> DraftRows[W] | None:
    """The rows of a draft head on the model's device; None without one."""
    if draft is None:
        return None
    packed = PackedLinear(
        codes=draft.packed.to(weights.device),
        scales=draft.scale.to(weights.device),
        bits=draft.scheme.bits,
        group_size=draft.scheme.group_size or 0,
    )
    head = weights.prepare(packed, False, "exact")
    return DraftRows(draft.ids.long().to(weights.device), head)
