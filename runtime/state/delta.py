"""What a gated DeltaNet layer needs beside its linears: small weights, and a state per sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights around the recurrence, in FP32 whatever the checkpoint stored.

    Attributes:
        conv: [C, W] taps of the causal depthwise convolution, the last one for the current token;
            channels in the order q, k, v: C = 2 * Hk * Dk + Hv * Dv.
        decay: [Hv], `-exp(A_log)`.
        dt_bias: [Hv].
        norm: [Dv], gain of the norm of each head's output.
        key_heads: Hk; value head i reads q and k of head i // (Hv / Hk).
        key_dim: Dk.
    """

    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    key_heads: int
    key_dim: int

    @property
    def value_heads(self) -> int:
        """Hv."""
        return self.decay.shape[0]

    @property
    def value_dim(self) -> int:
        """Dv."""
        return self.norm.shape[0]


@dataclass(frozen=True, slots=True)
class DeltaSlots:
    """States of linear layers; a step reads one slot and writes another or the same.

    Attributes:
        conv: [L, S, W - 1, C] the last inputs of the convolution, oldest first, before it and SiLU.
        memory: [L, S, Hv, Dk, Dv] float32.
        arrived: [S, Hk] int32, zero between kernels: counts programs that have read a window they
            share, by slot that is read.
    """

    conv: Tensor
    memory: Tensor
    arrived: Tensor

    @property
    def count(self) -> int:
        """Slots; none where the model has no linear layer."""
        return self.memory.shape[1] if self.memory.dim() > 1 else 0

    def state(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """A layer's window [W - 1, C] and memory [Hv, Dk, Dv] in a slot."""
        return self.conv[layer, slot], self.memory[layer, slot]

    def clear(self, slot: int) -> None:
        """Put the state before the first token into a slot."""
        self.conv[:, slot].zero_()
        self.memory[:, slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy a slot to another."""
        self.conv[:, target].copy_(self.conv[:, source])
        self.memory[:, target].copy_(self.memory[:, source])


def no_slots() -> DeltaSlots:
    """The states of a model without linear layers."""
    return DeltaSlots(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int32))


def new_slots(
    layers: int, count: int, weights: DeltaWeights, dtype: torch.dtype, device: str
) -> DeltaSlots:
    """Slots that hold the state before the first token, for linear layers of the same sizes."""
    channels, taps = weights.conv.shape
    sizes = (layers, count, weights.value_heads, weights.key_dim, weights.value_dim)
    return DeltaSlots(
        conv=torch.zeros(layers, count, taps - 1, channels, dtype=dtype, device=device),
        memory=torch.zeros(sizes, dtype=torch.float32, device=device),
        arrived=torch.zeros(count, weights.key_heads, dtype=torch.int32, device=device),
    )
