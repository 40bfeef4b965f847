"""Page-locked memory of the host: rings in which steps leave results, and numbers for the device.

Neither side waits for the other: a copy runs behind the steps under way, and the host reads a token
once the step that left it is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lowbit.formats.sampling_ranges import MOST_LOGPROBS

# Length of each row's ring buffer, indexed by the token's position: more than two steps choose for
# a sequence, since the host reads one while the next writes.
RING = 64


def new_ring(rows: int, pinned: bool) -> Tensor:
    """Rings of so many rows: [RING, R] int64 on the host, page-locked if a GPU writes there."""
    return torch.zeros(RING, rows, dtype=torch.int64, pin_memory=pinned)


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Memory of the host, page-locked beside a GPU, in which steps leave log-probabilities.

    Entry [position % RING, row] is of the token at that position; its first column is that token,
    the others are the likeliest tokens from the first down.
    """

    ids: Tensor  # [RING, R, MOST_LOGPROBS + 1] int64; -1 where the vocabulary has fewer tokens
    values: Tensor  # [RING, R, MOST_LOGPROBS + 1] float32, natural logarithms; NaN where logits are


def new_log_probabilities(rows: int, pinned: bool) -> LogProbabilities:
    """Memory for so many rows; page-locked if a GPU writes to it."""
    shape = (RING, rows, MOST_LOGPROBS + 1)
    return LogProbabilities(
        ids=torch.zeros(shape, dtype=torch.int64, pin_memory=pinned),
        values=torch.zeros(shape, dtype=torch.float32, pin_memory=pinned),
    )


def to_device(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a device, behind what is under way there; the host does not wait.

    PyTorch keeps the page-locked source until the copy is done.
    """
    source = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return source.to(device, non_blocking=True)


def write(target: Tensor, values: object) -> None:
    """Copy numbers into a tensor of a device, as `to_device` does."""
    source = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
    target.copy_(source, non_blocking=True)


def write_rows(target: Tensor, rows: Sequence[Sequence[int]]) -> None:
    """Copy numbers into the rows of a tensor of a device, zeros behind them, as `to_device` does.

    Args:
        target: [R, W] int32.
        rows: R, of W numbers at most.
    """
    values = np.zeros(target.shape, np.int32)  # a tensor takes 20 times as long to make of lists
    for row, numbers in zip(values, rows, strict=True):
        row[: len(numbers)] = numbers
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
