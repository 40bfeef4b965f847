"""The calibration windows on their way through the layers: two sets of hidden states."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.calibrate.held_out import count_held
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.walk import embed
from lowbit.convert.plan.calibration_cost import STATES_SHARE
from lowbit.formats.machine.free_memory import free_bytes


@dataclass(frozen=True, slots=True)
class Windows:
    """Hidden states before a layer; the last windows are held out.

    Attributes:
        hidden: of the model quantized so far, [windows, T, h] float32.
        original: of the original, same shape; the same tensor where nothing else is needed.
        learned: number of windows to learn from, which come first.
    """

    hidden: Tensor
    original: Tensor
    learned: int

    def sets(self) -> tuple[Tensor, ...]:
        """The sets of states, each once."""
        if self.hidden is self.original:
            return (self.original,)
        return self.hidden, self.original

    @property
    def holds_out(self) -> bool:
        """True if there are windows that nothing is learned from."""
        return self.learned < len(self.hidden)

    @property
    def held(self) -> slice:
        """Windows to judge by; of few windows, all are learned from and judged by."""
        return slice(self.learned if self.holds_out else 0, len(self.hidden))


def begin(
    model: LayeredModel, samples: Tensor, device: torch.device, from_original: bool
) -> Windows:
    """Embed the calibration text, on the device where it fits besides the rest.

    Args:
        model: the original.
        samples: [windows, T] int64 token ids.
        device: where to compute.
        from_original: keep the original's states only, for both sets.

    Raises:
        CheckpointError: a token id beyond the vocabulary.
    """
    sets = 1 if from_original else 2
    need = sets * samples.numel() * model.hidden_size * 4 * 5 // 4  # what the allocator keeps, too
    free = None if device.type == "cpu" else free_bytes(device.type)
    place = device if free is not None and need * STATES_SHARE <= free else torch.device("cpu")
    hidden = embed(model, samples, place)
    original = hidden if from_original else hidden.clone()
    return Windows(hidden, original, len(samples) - count_held(len(samples)))
