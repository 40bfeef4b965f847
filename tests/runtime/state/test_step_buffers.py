"""Steps of a plan: rows of the rotary tables of their tokens, and embeddings of images."""

from dataclasses import replace

import torch

from lowbit.formats.page_counts import SCRATCH
from lowbit.runtime.models.layer_parts import embed
from lowbit.runtime.state.rope import rope_tables
from lowbit.runtime.state.step import Embedded, Span, StepPlan, parts_of
from lowbit.runtime.state.step_buffers import new_chunk_images, new_step, new_step_buffers

TABLES = torch.zeros(4, 2, dtype=torch.int32)
SHIFTS = torch.tensor([0, -5, 0, -2], dtype=torch.int32)
SPANS = (Span(1, 20, 2), Span(2, 7, 1), Span(3, 9, 1))
PLAN = StepPlan(4, 3, 64, 2, SPANS)
W, H = 8, 4
AXES = torch.arange(15).view(3, 5)
EMBEDDING = torch.arange(40.0).view(10, 4)


def test_text_alone_is_turned_by_its_positions() -> None:
    _, step = new_step(PLAN, [1, 2, 3, 4], TABLES, SHIFTS)
    assert step.own_angles is None
    assert step.angles is step.positions
    rope = rope_tables(30, 8, 1e4, "cpu")
    assert step.rotation(rope) == (rope, step.positions)


def test_text_behind_images_is_turned_by_the_shift_of_its_row() -> None:
    _, step = new_step(replace(PLAN, shifted=True), [1, 2, 3, 4], TABLES, SHIFTS)
    assert step.positions.tolist() == [20, 21, 7, 9]
    assert step.angles.tolist() == [15, 16, 7, 7]
    assert step.angles.dtype == torch.int32


def test_parts_of_a_step_are_shifted_too() -> None:
    spans = tuple(Span(row, 10 * row, 1) for row in (1, 2, 3))
    plan = StepPlan(3, 3, 64, 1, spans, shifted=True)
    buffers = new_step_buffers(3, TABLES.device)
    buffers.write(spans, [1, 2, 3], 3)
    angles = [buffers.step(part, TABLES, SHIFTS).angles.tolist() for part in parts_of(plan, 2)]
    assert angles == [[5, 20], [28]]


def test_a_chunk_with_an_image_has_its_times_as_angles() -> None:
    """Drafters know no other axis; the model makes tables of its own."""
    axes = torch.tensor([[4, 5, 5], [4, 5, 6], [4, 5, 5]])
    plan = StepPlan(3, 1, 64, 3, (Span(1, 4, 3),), prompt=True, axes=axes)
    _, step = new_step(plan, [1, 2, 3], TABLES, SHIFTS)
    assert step.angles.tolist() == [4, 5, 5]
    assert step.axes is not None
    assert torch.equal(step.axes, axes)


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
            found = embed(ops, buffers.ids[:W], EMBEDDING, step)  # type: ignore[arg-type]
        expected = EMBEDDING[[9, 8, 7, 6, 5]]
        expected[first : first + count] = rows.detach()
        assert torch.equal(found[:5], expected)
        assert not found.requires_grad
        assert step.axes is not None
        assert step.axes[:, :5].tolist() == (AXES + first).tolist()
        assert step.axes[:, 5:].tolist() == [[0] * 3] * 3
        assert step.angles.tolist() == step.axes[0].tolist()
