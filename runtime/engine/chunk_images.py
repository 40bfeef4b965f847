"""Parts of images in a chunk of a prompt, in tensors that the chunk's graph reads."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.runtime.state.host_rings import write_rows
from lowbit.runtime.state.step import Embedded, Step, StepPlan


@dataclass(frozen=True, slots=True)
class ChunkImages:
    """Embeddings and positions of the tokens of a chunk of at most W tokens."""

    rows: Tensor  # [W, h] embeddings of the image tokens, each in the place of its token
    # [4, W] int32 by token: its positions in time, row and column; 1 for an image token, else 0
    positions: Tensor

    def write(self, plan: StepPlan) -> None:
        """Write those of a chunk, behind the steps under way."""
        if plan.axes is None:
            raise ValueError("a chunk without a part of an image")
        is_image = [0] * plan.tokens
        for each in plan.embedded:
            stop = each.first + len(each.rows)
            self.rows[each.first : stop].copy_(each.rows.detach(), non_blocking=True)
            is_image[each.first : stop] = [1] * len(each.rows)
        write_rows(self.positions, (*plan.axes.tolist(), is_image))

    def step(self, step: Step) -> Step:
        """The step of text with the images that were written last."""
        M = len(step.positions)
        axes = self.positions[:3, :M].long()
        given = Embedded(0, self.rows[:M], self.positions[3, :M, None].bool())
        return replace(step, axes=axes, own_angles=axes[0].int(), embedded=(given,))


def new_chunk_images(hidden: Tensor) -> ChunkImages:
    """Buffers of zeros for chunks of up to W tokens, with `hidden` [W, h] for their sizes."""
    positions = torch.zeros(4, len(hidden), dtype=torch.int32, device=hidden.device)
    return ChunkImages(torch.zeros_like(hidden), positions)
