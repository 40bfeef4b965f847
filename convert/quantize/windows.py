"""The calibration windows: their order, those held out, and their states through the layers."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.original.layer import Layer
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.walk import LEARNING_TOKENS, batches, embed
from lowbit.convert.plan.calibration_cost import STEP_TOKENS
from lowbit.convert.plan.calibration_memory import STATES_SHARE
from lowbit.formats.machine.memory import free_bytes

SHARE = 16  # one window of so many is held out, none of fewer


@dataclass(frozen=True, slots=True)
class WindowStates:
    """Hidden states before a layer; the last windows are held out."""

    hidden: Tensor  # of the model quantized so far, [windows, T, h] float32
    original: Tensor  # of the original, same shape; the same tensor where nothing else is needed
    learned: int  # number of windows to learn from, which come first

    def sets(self) -> tuple[Tensor, ...]:
        """The sets of states, each once."""
        if self.hidden is self.original:
            return (self.original,)
        return self.hidden, self.original

    @property
    def only_learned(self) -> "WindowStates":
        """The windows to learn from, without those held out."""
        original = self.original[: self.learned]
        same = self.hidden is self.original
        return WindowStates(
            original if same else self.hidden[: self.learned], original, self.learned
        )

    @property
    def holds_out(self) -> bool:
        """True if there are windows that nothing is learned from."""
        return self.learned < len(self.hidden)

    @property
    def heldout(self) -> slice:
        """Windows to judge by; of few windows, all are learned from and judged by."""
        return slice(self.learned if self.holds_out else 0, len(self.hidden))


def begin(
    model: LayeredModel, samples: Tensor, device: torch.device, from_original: bool
) -> WindowStates:
    """Embed the calibration text, on the device where it fits besides the rest.

    Args:
        samples: [windows, T] int64 token ids.
        from_original: keep the original's states only, for both sets.

    Raises:
        CheckpointError: a token id beyond the vocabulary.
    """
    sets = 1 if from_original else 2
    need = sets * samples.numel() * model.hidden_size * 4 * 5 // 4  # what the allocator keeps, too
    free = None if device.type == "cpu" else free_bytes(device.type)
    states_device = (
        device if free is not None and need * STATES_SHARE <= free else torch.device("cpu")
    )
    hidden = embed(model, samples, states_device)
    original = hidden if from_original else hidden.clone()
    return WindowStates(hidden, original, len(samples) - len(samples) // SHARE)


def shuffled(samples: Tensor) -> Tensor:
    """Windows in random order, the same in every run, so that those held out come from all texts.

    Args:
        samples: [windows, T] int64 token ids.
    """
    return samples[torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))]


def random_batches(windows: int, length: int, steps: int) -> Iterator[Tensor]:
    """Numbers of the windows of every step, in random order, the same in every run.

    All windows of `length` tokens come before any comes again.
    """
    size = max(1, STEP_TOKENS // length)
    generator = torch.Generator().manual_seed(0)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        while len(order) < size:
            order = torch.cat([order, torch.randperm(windows, generator=generator)])
        yield order[:size]
        order = order[size:]


def output_error(layer: Layer, hidden: Tensor, target: Tensor, device: torch.device) -> float:
    """Mean square of a layer's output error.

    Args:
        hidden: input, [windows, T, h] float32.
        target: output to compare with, same shape.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():
        for part in batches(hidden, device, LEARNING_TOKENS):
            out = layer(hidden[part].to(device))
            total += (out - target[part].to(device)).square().sum(dtype=torch.float64)
    return float(total) / hidden.numel()
