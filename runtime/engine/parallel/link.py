"""The way of a runner on a GPU to those of the other ranks, which run the same steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from lowbit.runtime.models.shared_decoder import Crew
from lowbit.runtime.state.decode_inputs import DecodeInputs
from lowbit.runtime.state.step import StepPlan
from lowbit.runtime.weights.table import Table

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuLink:
    """See the module."""

    # Writes words of the first rank, [M, N] int32, over those of the others, on the device
    share_words: Callable[[Tensor], None]
    crew: Crew | None = None  # the other ranks; None on them

    def together(self, task: object, work: Callable[[], T]) -> T:
        """Have the other ranks run a task, and do this rank's part of it; see `Crew.run`."""
        return work() if self.crew is None else self.crew.run(task, work)

    def share_hidden(self, hidden: Tensor) -> None:
        """Give hidden states [M, h] of the first rank to all."""
        self.share_words(hidden.view(torch.int32))

    def share_embedded(self, plan: StepPlan, like: Table) -> StepPlan:
        """Give the embeddings of a chunk's image tokens to all, in the type of the model's own.

        Args:
            plan: with the embeddings on the first rank, see `unembedded` for the others.
            like: the model's embedding.
        """
        embedded = []
        for each in plan.embedded:
            if self.crew is None:
                shape = len(each.rows), like.shape[1]
                rows = torch.empty(shape, dtype=like.dtype, device=like.device)
            else:
                rows = each.rows.detach().to(like.device, like.dtype).contiguous()
            self.share_hidden(rows)
            embedded.append(replace(each, rows=rows))
        return replace(plan, embedded=tuple(embedded))

    def share_inputs(self, inputs: DecodeInputs, plan: StepPlan) -> Tensor:
        """Give the first rank's inputs of a step, or of a part, to all.

        Returns:
            [W] int32, the tokens, of which the plan has a part.
        """
        step, part = inputs.step, slice(plan.first, plan.first + plan.tokens)
        if not plan.drafts:
            step.ids[part].copy_(inputs.chosen[part])
        self.share_words(step.block[:, : part.stop + 1])
        return step.ids


def unembedded(plan: StepPlan) -> StepPlan:
    """The plan with as many embeddings of images, [n, 0]: `share_embedded` brings the numbers."""
    empty = (replace(each, rows=each.rows[:, :0]) for each in plan.embedded)
    return replace(plan, embedded=tuple(empty))
