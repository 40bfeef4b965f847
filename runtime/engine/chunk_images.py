"""Parts of images in a chunk of a prompt, where the chunk's graph finds them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.runtime.state.host_rings import write_rows
from lowbit.runtime.state.step import Embedded, Step, StepPlan


@dataclass(frozen=True, slots=True)
class ChunkImages:
    """Embeddings and places of the tokens of a chunk of at most W tokens."""

    rows: Tensor  # [W, h] embeddings of the tokens that are an image's, where they stand
    places: Tensor  # [4, W] int32: time, row and column of each token, and 1 for an image's

    def write(self, plan: StepPlan) -> None:
        """Write those of a chunk, behind the steps under way; see `Step`."""
        if plan.axes is None:
            raise ValueError("a chunk without a part of an image")
        ours = [0] * plan.tokens
        for each in plan.embedded:
            stop = each.first + len(each.rows)
            self.rows[each.first : stop].copy_(each.rows.detach(), non_blocking=True)
            ours[each.first : stop] = [1] * len(each.rows)
        write_rows(self.places, (*plan.axes.tolist(), ours))

    def step(self, step: Step) -> Step:
        """A step of text with what is written here."""
        M = len(step.positions)
        axes = self.places[:3, :M].long()
        given = Embedded(0, self.rows[:M], self.places[3, :M, None].bool())
        return replace(step, axes=axes, own_angles=axes[0].int(), embedded=(given,))


def new_chunk_images(hidden: Tensor) -> ChunkImages:
    """Zeros for chunks of as many tokens as there are hidden states [W, h]."""
    places = torch.zeros(4, len(hidden), dtype=torch.int32, device=hidden.device)
    return ChunkImages(torch.zeros_like(hidden), places)
