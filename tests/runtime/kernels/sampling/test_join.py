"""join_copies: the kernel, and plain torch, against a loop over the sequences."""

import random

import pytest
import torch
from torch import Tensor

from lowbit.runtime.backends.cpu_sampling import join_copies as join_by_torch
from lowbit.runtime.kernels.sampling.join import join_copies as join_by_kernel
from lowbit.runtime.state.decode_inputs import DecodeInputs, new_decode_inputs
from lowbit.runtime.state.host_rings import RING, new_ring

ROWS, N = 5, 12
LAST, TEXT = 40, tuple(range(100, 100 + N))  # position of the last token; copied tokens


def inputs_of(ids: list[list[int]], rows: list[int], firsts: list[int]) -> DecodeInputs:
    inputs, k = new_decode_inputs(16, ROWS, torch.device("cpu")), len(ids[0]) - 1
    for name, each in (
        ("ids", ids),
        ("rows", [[row] * (k + 1) for row in rows]),
        ("positions", [list(range(first, first + k + 1)) for first in firsts]),
    ):
        flat = torch.tensor(each, dtype=torch.int32).flatten()
        getattr(inputs.step, name)[: len(flat)] = flat
    return inputs


def joined(
    join: str, ids: list[list[int]], rows: list[int], firsts: list[int], copies: list[list[int]]
) -> tuple[list[list[int]], Tensor]:
    """Ids of a round, and what the host reads."""
    inputs, copied = inputs_of(ids, rows, firsts), new_ring(ROWS, False)
    copied.fill_(7)
    numbers = torch.tensor(copies, dtype=torch.int32)
    B, k = len(ids), len(ids[0]) - 1
    before = inputs.step.ids.clone()
    by = join_by_kernel if join == "kernel" else join_by_torch
    by(inputs, numbers, copied, B, k)
    assert torch.equal(inputs.step.ids[B * (k + 1) :], before[B * (k + 1) :])
    return inputs.step.ids[: B * (k + 1)].view(B, k + 1).tolist(), copied


@pytest.mark.parametrize("join", ["kernel", "torch"])
@pytest.mark.parametrize(
    ("start", "agreeing", "ids", "expected"),
    [
        (LAST + 1, 0, [9, 1, 2, 3], [9, 100, 101, 102]),  # alone, the host knows all tokens
        (LAST + 1, 2, [9, 100, 101, 3], [9, 100, 101, 102]),  # two drafts agree
        (LAST + 1, 2, [9, 100, 2, 102], None),  # one does
        (LAST + 1, 1, [9, 100, 2, 3], [9, 100, 101, 102]),
        (LAST - 1, 0, [101, 1, 2, 3], [101, 102, 103, 104]),  # the host is two tokens behind
        (LAST - 1, 0, [9, 1, 2, 3], None),  # which were others
        (LAST - 1, 2, [101, 102, 2, 3], None),
        (LAST - 8, 0, [108, 1, 2, 3], [108, 109, 110, 111]),  # just far enough
        (LAST - 9, 0, [109, 1, 2, 3], None),  # too short
        (LAST + 2, 0, [9, 1, 2, 3], None),  # begins behind the round
        (0, 0, [9, 1, 2, 3], None),  # no copy
    ],
)
def test_a_copy_holds_where_it_fits(
    join: str, start: int, agreeing: int, ids: list[int], expected: list[int] | None
) -> None:
    found, copied = joined(join, [ids], [2], [LAST], [[start, agreeing, *TEXT]])
    assert found == [expected or ids]
    assert copied[LAST % RING, 2] == (expected is not None)
    copied[LAST % RING, 2] = 7
    assert (copied == 7).all()


def test_the_kernel_is_as_plain_torch() -> None:
    draw = random.Random(3)
    for _ in range(40):
        B, k = draw.choice([(1, 15), (2, 7), (4, 3), (3, 2), (8, 1)])
        rows = [draw.randrange(ROWS) for _ in range(B)] if B > 4 else draw.sample(range(ROWS), B)
        firsts = [draw.randrange(3, 200) + 200 * b for b in range(B)]
        ids = [[draw.randrange(3) for _ in range(k + 1)] for _ in range(B)]
        copies = [
            [first + draw.randrange(-3, 3), draw.randrange(3), *(draw.randrange(3) for _ in TEXT)]
            for first in firsts
        ]
        found, flags = joined("kernel", ids, rows, firsts, copies)
        expected, others = joined("torch", ids, rows, firsts, copies)
        assert found == expected
        assert torch.equal(flags, others)
