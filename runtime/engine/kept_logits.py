"""Logits of the first half of a step, kept for the second half, which chooses from them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.runtime.engine.graphs import round_tokens, width_for
from lowbit.runtime.state.step import StepPlan
from lowbit.runtime.thresholds import EXACT_TOKENS

ALIGNED = 16  # rows of logits on a GPU are a multiple of so many


@dataclass(slots=True)
class KeptLogits:
    """Logits of the parts of a step, copied where there is room for them."""

    sequences: int  # most of a step
    vocabulary: int  # real tokens
    padded: int  # rows of the head
    device: torch.device
    # [EXACT_TOKENS or fewer, V] float32, for each EXACT_TOKENS tokens of a step
    parts: list[Tensor] = field(default_factory=list)
    fixed: bool = False  # there is room for them, where recorded halves find them

    def make_room(self) -> None:
        """Allocate those of the largest step, before half a step is recorded."""
        sizes = self.sequences, self.vocabulary, self.padded
        self.parts = list(torch.split(new_kept(*sizes, self.device), EXACT_TOKENS))
        self.fixed = True

    def keep(self, logits: Tensor, part: StepPlan) -> None:
        """Keep logits [M, V or more] of the first half of a step for the second half.

        part: of the step, whose parts come in order.
        """
        place = part.first // EXACT_TOKENS
        if self.fixed:
            kept = self.parts[place]
            kept[: part.tokens].copy_(logits[:, : kept.shape[1]])
        else:
            self.parts[place:] = [logits]

    def of(self, part: StepPlan) -> Tensor:
        """Logits [M, V] that `keep` was given for a part of a step."""
        return self.parts[part.first // EXACT_TOKENS][: part.tokens]


def new_kept(sequences: int, vocabulary: int, padded: int, device: str | torch.device) -> Tensor:
    """Room for the logits of the largest step or round, [W, V] float32, rows aligned."""
    widest = max(width_for(sequences), round_tokens(sequences))
    logits = min(-(-vocabulary // ALIGNED) * ALIGNED, padded)
    return torch.empty(widest, logits, dtype=torch.float32, device=device)
