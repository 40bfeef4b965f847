"""Windows to learn from, batch by batch, and windows held out to judge by."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.original.layer import Layer, batches
from lowbit.convert.plan.calibration_cost import STEP_TOKENS

SHARE = 16  # one window of so many


def shuffled(samples: Tensor) -> Tensor:
    """Windows in random order, the same in every run, so that those held out come from all texts.

    Args:
        samples: [windows, T] int64 token ids.
    """
    return samples[torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))]


def count_held(windows: int) -> int:
    """Number of windows to hold out: one of `SHARE`, none of few."""
    return windows // SHARE


@dataclass(frozen=True, slots=True)
class Batches:
    """Windows in random order, the same in every run; all before any comes again.

    Attributes:
        windows: how many there are, numbered from 0.
        length: tokens of a window.
    """

    windows: int
    length: int

    def take(self, steps: int) -> Iterator[Tensor]:
        """Numbers of the windows of every step."""
        size = max(1, STEP_TOKENS // self.length)
        generator = torch.Generator().manual_seed(0)
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            while len(order) < size:
                order = torch.cat([order, torch.randperm(self.windows, generator=generator)])
            yield order[:size]
            order = order[size:]


def output_error(layer: Layer, hidden: Tensor, wanted: Tensor, device: torch.device) -> float:
    """Mean square of a layer's output error.

    Args:
        layer: with the weights to judge.
        hidden: input, [windows, T, h] float32.
        wanted: output to compare with, same shape.
        device: where to compute.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():
        for part in batches(hidden, device):
            out = layer(hidden[part].to(device))
            total += (out - wanted[part].to(device)).square().sum(dtype=torch.float64)
    return float(total) / hidden.numel()
