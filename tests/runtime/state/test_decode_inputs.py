"""Inputs of decode steps as the host writes them: tokens by their origins, padding, slots."""

import torch

from lowbit.runtime.state.decode_inputs import new_decode_inputs
from lowbit.runtime.state.step import NO_SLOT, Span, StepPlan
from lowbit.runtime.state.step_buffers import lone_step

CPU = torch.device("cpu")
SPANS = [Span(3, 40, 1, (), 3, (3,)), Span(1, 7, 1, (), 9, (1,)), Span(2, 0, 1, (), 2, (2,))]


def test_tokens_of_a_plain_step_come_from_where_they_are() -> None:
    """One from the step before, one that the host knows, one that a prompt has chosen."""
    inputs = new_decode_inputs(4, 5, CPU)
    inputs.chosen.copy_(torch.arange(len(inputs.chosen)) + 100)
    inputs.firsts.copy_(torch.arange(len(inputs.firsts)) + 500)
    inputs.write_plain(SPANS, known=[None, 77, None], before=[2, 0, None], M=4)
    assert inputs.chosen[:3].tolist() == [102, 77, 502]
    step = inputs.step.step(StepPlan(4, 4, 64, 1), torch.zeros(5, 1, dtype=torch.int32))
    assert step.positions.tolist() == [40, 7, 0, 0]
    assert step.rows.tolist() == [3, 1, 2, 0]
    assert step.read.tolist() == [3, 9, 2, 0]
    assert step.write.tolist() == [3, 1, 2, NO_SLOT]
    assert step.starts.tolist() == [0, 1, 2, 3, 4]  # padding is a sequence, too


def test_padding_of_a_round_is_a_last_sequence() -> None:
    inputs = new_decode_inputs(4, 5, CPU)
    spans = [Span(3, 40, 2, (), 3, (3, 6)), Span(1, 7, 1, (), 1, (1,))]
    inputs.write_round(spans, [11, 12, 13], M=8, head=([1, 2, 3],) * 6)
    assert inputs.step.ids[:8].tolist() == [11, 12, 13, 0, 0, 0, 0, 0]
    assert inputs.step.positions[:4].tolist() == [40, 41, 7, 0]
    assert inputs.step.places[:4].tolist() == [0, 1, 0, 0]
    assert inputs.step.writes[:8].tolist() == [3, 6, 1, *[NO_SLOT] * 5]
    assert inputs.step.starts[:4].tolist() == [0, 2, 3, 8]
    for numbers in (
        inputs.seen,
        inputs.seen_starts,
        inputs.chosen,
        inputs.ring_places,
        inputs.ends,
    ):
        assert numbers[:4].tolist() == [1, 2, 3, 0]


def test_a_lone_step_keeps_the_state_behind_its_last_token() -> None:
    step = lone_step(3, "cpu", first=62)
    assert step.positions.tolist() == [62, 63, 64]
    assert step.tables.tolist() == [[0, 0], [1, 2]]
    assert step.max_kv_len == 128
    assert (step.read.tolist(), step.write.tolist()) == ([1], [NO_SLOT, NO_SLOT, 1])
    assert step.spans == (Span(1, 62, 3, (1, 2), 1, (NO_SLOT, NO_SLOT, 1)),)
