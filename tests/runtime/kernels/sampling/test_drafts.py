"""begin_blocks and place_drafts: the kernels, and plain torch, against a loop."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.runtime.backends import cpu, cuda
from lowbit.runtime.state.block_inputs import new_block_inputs
from lowbit.runtime.state.decode_inputs import DecodeInputs, new_decode_inputs

ROWS, MASK, UNTOUCHED = 9, 77, -5
SIZES = [(1, 3, 3, 8), (1, 7, 7, 8), (2, 7, 7, 16), (1, 15, 7, 8), (3, 3, 3, 4), (8, 1, 1, 16)]


def inputs_of(B: int, k: int) -> DecodeInputs:
    """A round whose tokens, rows and positions are all different."""
    inputs = new_decode_inputs(16, ROWS, torch.device("cpu"))
    step, count = inputs.step, B * (k + 1)
    step.ids[:count] = 1000 + torch.arange(count)
    step.rows[:count] = torch.arange(1, 1 + B).repeat_interleave(k + 1)
    step.positions[:count] = 300 * step.rows[:count] + torch.arange(k + 1).repeat(B)
    return inputs


@pytest.mark.parametrize("ops", [cpu, cuda], ids=["torch", "kernel"])
@pytest.mark.parametrize(("B", "k", "made", "size"), SIZES)
def test_a_block_begins_with_the_last_token(
    ops: object, B: int, k: int, made: int, size: int
) -> None:
    begin: Callable[..., None] = vars(ops)["begin_blocks"]
    inputs, blocks = inputs_of(B, k), new_block_inputs(MASK, size, 8, torch.device("cpu"))
    found = blocks.ids, blocks.positions, blocks.rows, blocks.draft_positions, blocks.draft_rows
    for each in found:
        each.fill_(UNTOUCHED)
    before = inputs.step.block.clone()
    begin(inputs, blocks, B, k, made)
    assert torch.equal(inputs.step.block, before)
    firsts = [300 * row for row in range(1, 1 + B)]
    lasts = [1000 + b * (k + 1) for b in range(B)]
    expected = (
        [id for last in lasts for id in (last, *[MASK] * (size - 1))],
        [first + place for first in firsts for place in range(size)],
        [row for row in range(1, 1 + B) for _ in range(size)],
        [first + place for first in firsts for place in range(made)],
        [row for row in range(1, 1 + B) for _ in range(made)],
    )
    for tensor, numbers in zip(found, expected, strict=True):
        assert tensor[: len(numbers)].tolist() == numbers
        assert (tensor[len(numbers) :] == UNTOUCHED).all()


@pytest.mark.parametrize("ops", [cpu, cuda], ids=["torch", "kernel"])
@pytest.mark.parametrize("turned", [False, True])  # as a head makes them, one place after another
@pytest.mark.parametrize(("B", "k", "made"), [size[:3] for size in SIZES])
def test_drafts_are_placed_behind_last_tokens(
    ops: object, turned: bool, B: int, k: int, made: int
) -> None:
    place: Callable[..., None] = vars(ops)["place_drafts"]
    inputs, drafts = inputs_of(B, k), torch.arange(B * made).view(B, made)
    given: Tensor = drafts.T.contiguous().T if turned else drafts
    before = inputs.step.ids.tolist()
    place(inputs, given, B, k)
    ids = inputs.step.ids.tolist()
    for b in range(B):
        own = ids[b * (k + 1) : (b + 1) * (k + 1)]
        assert own == [before[b * (k + 1)], *drafts[b].tolist(), *[0] * (k - made)]
    assert ids[B * (k + 1) :] == before[B * (k + 1) :]
