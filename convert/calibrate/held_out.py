"""Windows to learn from, batch by batch, and windows held out to judge by."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.original.layer import Layer

BATCH_TOKENS = 2048  # of a step
SHARE = 16  # one window of so many


def split(windows: int) -> tuple[Tensor, Tensor]:
    """Numbers of the windows to learn from and of those held out; of few windows, all are both."""
    numbers = torch.arange(windows)
    if windows < SHARE:
        return numbers, numbers
    held = numbers % SHARE == SHARE - 1
    return numbers[~held], numbers[held]


@dataclass(frozen=True, slots=True)
class Batches:
    """Windows in random order, the same in every run; all before any comes again.

    Attributes:
        used: [n] int64, their numbers.
        length: tokens of a window.
    """

    used: Tensor
    length: int

    def take(self, steps: int) -> Iterator[Tensor]:
        """Numbers of the windows of every step."""
        size = max(1, BATCH_TOKENS // self.length)
        generator = torch.Generator().manual_seed(0)
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            while len(order) < size:
                again = torch.randperm(len(self.used), generator=generator)
                order = torch.cat([order, self.used[again]])
            yield order[:size]
            order = order[size:]


def output_error(
    layer: Layer,
    hidden: Tensor,
    wanted: Tensor,
    windows: Tensor,
    device: torch.device,
) -> float:
    """Mean square of a layer's output error over some windows.

    Args:
        layer: any.
        hidden: what goes in, [windows, T, h] float32.
        wanted: what should come out, same shape.
        windows: [n] int64, numbers of those to look at.
        device: where to compute.
    """
    total = 0.0
    with torch.no_grad():
        for part in torch.split(windows, 1):
            out = layer(hidden[part].to(device))
            total += float((out - wanted[part].to(device)).square().mean(dtype=torch.float64))
    return total / len(windows)
