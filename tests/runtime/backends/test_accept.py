"""What a round leaves for the next one, against drafts that are compared one by one."""

import random

import pytest
import torch
from torch import Tensor

from lowbit.runtime.backends import cpu
from lowbit.runtime.kernels.sampling.accept import accept as accept_on_gpu
from lowbit.runtime.state.decode_inputs import HIDDEN_RING, DecodeInputs, new_decode_inputs
from lowbit.runtime.state.host_rings import RING
from lowbit.runtime.state.step_buffers import PADDING

ROWS, WIDE = 20, 64
SIZES = [(B, k) for B in range(1, 9) for k in range(1, 16) if B * (k + 1) <= 16]


def round_of(B: int, k: int, draw: random.Random) -> DecodeInputs:
    """A round whose tokens have been chosen among three, so that drafts often meet them."""

    def ints(values: list[int]) -> Tensor:
        return torch.tensor([*values, *[0] * (WIDE + PADDING - len(values))])

    rows = draw.sample(range(1, ROWS), B)
    firsts = [draw.randrange(200) for _ in rows]
    ids = [draw.randrange(3) for _ in range(B * (k + 1))]
    chosen = [draw.randrange(3) for _ in range(B * (k + 1))]
    if B > 2:
        rows[1] = 0  # a row of nobody stays where it is
    moved = [first + place + (row > 0) for row, first in zip(rows, firsts, strict=True)
             for place in range(k + 1)]  # fmt: skip
    inputs = new_decode_inputs(WIDE, ROWS, torch.device("cpu"))
    inputs.step.ids[:] = ints(ids)
    inputs.step.positions[:] = ints(moved)
    inputs.step.rows[:] = ints([row for row in rows for _ in range(k + 1)])
    inputs.step.reads[:] = ints([-1] * B)
    inputs.step.writes[:] = ints([100 + at for at in range(B * (k + 1))])
    inputs.chosen[:] = ints(chosen)
    inputs.right.fill_(-1)
    return inputs


def check(before: DecodeInputs, after: DecodeInputs, B: int, k: int) -> None:
    for b in range(B):
        start = b * (k + 1)
        row = int(before.step.rows[start])
        first = int(before.step.positions[start]) - (row > 0)
        drafts = before.step.ids[start + 1 : start + k + 1].tolist()
        chosen = before.chosen[start : start + k + 1].tolist()
        right = 0
        while right < k and drafts[right] == chosen[right]:
            right += 1
        assert after.right[first % RING, row] == right
        part = slice(start, start + k + 1)
        assert after.seen[part].tolist() == list(range(first, first + k + 1))
        ring_places = [
            row * HIDDEN_RING + place % HIDDEN_RING for place in range(first, first + k + 1)
        ]
        assert after.ring_places[part].tolist() == ring_places
        assert after.ends[b] == start + right
        assert after.wrong[part].tolist() == [0] * (right + 1) + [row] * (k - right)
        assert after.step.reads[b] == 100 + start + right
        assert after.step.ids[start] == chosen[right]
        following = first + 1 + right if row else first
        places = range(k + 1) if row else [0] * (k + 1)
        assert after.step.positions[part].tolist() == [following + place for place in places]
    assert (after.right >= 0).sum() == B
    rest = slice(B * (k + 1), WIDE)
    for was, now in zip(read_by_rounds(before), read_by_rounds(after), strict=True):
        assert torch.equal(now[rest], was[rest])


def read_by_rounds(inputs: DecodeInputs) -> tuple[Tensor, ...]:
    return inputs.step.ids, inputs.step.positions, inputs.seen, inputs.wrong


def moved_to(inputs: DecodeInputs, device: str) -> DecodeInputs:
    moved = new_decode_inputs(WIDE, ROWS, torch.device(device))
    for name in ("numbers", "longs", "wrong", "right"):
        getattr(moved, name).copy_(getattr(inputs, name))
    return moved


@pytest.mark.parametrize(("B", "k"), SIZES)
def test_the_next_round_begins_behind_the_drafts_that_were_right(B: int, k: int) -> None:
    draw = random.Random(16 * B + k)
    for _ in range(20):
        before = round_of(B, k, draw)
        after = moved_to(before, "cpu")
        cpu.accept(after, B, k)
        check(before, after, B, k)


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "k"), SIZES)
def test_the_kernel_does_the_same(B: int, k: int) -> None:
    draw = random.Random(16 * B + k)
    for _ in range(20):
        before = round_of(B, k, draw)
        after = moved_to(before, "cuda")
        accept_on_gpu(after, B, k)
        torch.cuda.synchronize()
        check(before, moved_to(after, "cpu"), B, k)
