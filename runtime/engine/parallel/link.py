"""The way of a runner on a GPU to those of the other ranks, which run the same steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lowbit.runtime.models.shared_decoder import Crew
from lowbit.runtime.state.decode_inputs import DecodeInputs
from lowbit.runtime.state.step import StepPlan

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
