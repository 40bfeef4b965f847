"""Outputs of a model's layers, which a drafter reads beside it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HiddenTaps:
    """Room for the outputs of some layers in a step.

    Attributes:
        layers: whose outputs are kept.
        out: [M, n * h], written: the n outputs of a token side by side, in the order of `layers`.
    """

    layers: tuple[int, ...]
    out: Tensor

    def take(self, layer: int, x: Tensor) -> None:
        """Keep a copy of a layer's output [M, h] if it is one of these."""
        if layer in self.layers:
            h, place = x.shape[1], self.layers.index(layer)
            self.out[:, place * h : (place + 1) * h] = x


def new_hidden_taps(layers: tuple[int, ...], tokens: int, h: int, dtype: torch.dtype) -> HiddenTaps:
    """Room for a step of so many tokens, on the CPU."""
    return HiddenTaps(layers, torch.empty(tokens, len(layers) * h, dtype=dtype))
