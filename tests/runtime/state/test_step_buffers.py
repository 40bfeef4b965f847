"""Steps of a plan: which rows of the rotary tables their tokens take."""

from dataclasses import replace

import torch

from lowbit.runtime.state.rope import rope_tables
from lowbit.runtime.state.step import Span, StepPlan, parts_of
from lowbit.runtime.state.step_buffers import new_step, new_step_buffers

TABLES = torch.zeros(4, 2, dtype=torch.int32)
SHIFTS = torch.tensor([0, -5, 0, -2], dtype=torch.int32)
SPANS = (Span(1, 20, 2), Span(2, 7, 1), Span(3, 9, 1))
PLAN = StepPlan(4, 3, 64, 2, SPANS)


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
