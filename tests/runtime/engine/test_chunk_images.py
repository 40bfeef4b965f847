"""Buffers of a chunk's images: written under any mode of autograd, and again."""

import torch

from lowbit.runtime.engine.chunk_images import new_chunk_images
from lowbit.runtime.models.layer_parts import embed
from lowbit.runtime.state.page_counts import SCRATCH
from lowbit.runtime.state.step import Embedded, Span, StepPlan
from lowbit.runtime.state.step_buffers import new_step_buffers

W, H = 8, 4
AXES = torch.arange(15).view(3, 5)
TABLE = torch.arange(40.0).view(10, 4)


class Lookup:
    """Operations of a model that only looks tokens up."""

    def embed(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table[ids]


def test_rows_stand_in_their_places_in_chunk_after_chunk() -> None:
    images, buffers = new_chunk_images(torch.zeros(W, H)), new_step_buffers(W, torch.device("cpu"))
    span = Span(1, 0, 5)
    padded = StepPlan(W, 1, 64, longest=W, spans=(Span(SCRATCH, 0, W),), prompt=True)
    tables, ops = torch.zeros(2, 1, dtype=torch.int32), Lookup()
    for first, count, learns in ((1, 3, True), (0, 2, False), (4, 1, True)):
        rows = torch.randn(count, H, requires_grad=learns)
        plan = StepPlan(
            5, 1, 64, 5, (span,), prompt=True, embedded=(Embedded(first, rows),), axes=AXES + first
        )
        with torch.inference_mode(not learns):
            buffers.write(plan.spans, [9, 8, 7, 6, 5], W)
            images.write(plan)
            step = images.step(buffers.step(padded, tables))
            found = embed(ops, buffers.ids[:W], TABLE, step)  # type: ignore[arg-type]
        expected = TABLE[[9, 8, 7, 6, 5]]
        expected[first : first + count] = rows.detach()
        assert torch.equal(found[:5], expected)
        assert not found.requires_grad
        assert step.axes is not None
        assert step.axes[:, :5].tolist() == (AXES + first).tolist()
        assert step.axes[:, 5:].tolist() == [[0] * 3] * 3
        assert step.angles.tolist() == step.axes[0].tolist()
