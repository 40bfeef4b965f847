"""Recurrent states of gated DeltaNet, of all sequences."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.architectures.config import LinearLayers

L2_EPS = 1e-6  # added to the sum of squares of each head of q and k, whatever the norms use


@dataclass(frozen=True, slots=True)
class LayerStates:
    """States of one linear layer in all slots; see `DeltaSlots`."""

    window: Tensor  # [S, W - 1, C], `conv` of the layer
    memory: Tensor  # [S, Hv, Dk, Dv] float32
    arrived: Tensor  # [S, Hk] int32


@dataclass(frozen=True, slots=True)
class DeltaSlots:
    """Recurrent states by slot; a step reads one slot and writes another or the same."""

    # [L, S, W - 1, C] the last inputs of the convolution, oldest first, before it and SiLU
    conv: Tensor
    memory: Tensor  # [L, S, Hv, Dk, Dv] float32
    # [S, Hk] int32, zero between kernels: counts programs that have read a window they share, by
    # slot that is read
    arrived: Tensor

    @property
    def count(self) -> int:
        """Number of slots; 0 without linear layers."""
        return self.memory.shape[1] if self.memory.dim() > 1 else 0

    @property
    def size_bytes(self) -> int:
        """Memory of all slots."""
        return self.conv.nbytes + self.memory.nbytes + self.arrived.nbytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the state in a slot."""
        return (self.conv.nbytes + self.memory.nbytes) // max(1, self.count)

    def layer(self, index: int) -> LayerStates:
        """The states of a layer, as views."""
        return LayerStates(self.conv[index], self.memory[index], self.arrived)

    def clear(self, slot: int) -> None:
        """Reset a slot to the state before the first token."""
        self.conv[:, slot].zero_()
        self.memory[:, slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy a slot to another."""
        self.conv[:, target].copy_(self.conv[:, source])
        self.memory[:, target].copy_(self.memory[:, source])

    def pack(self, slot: int, packed: Tensor) -> None:
        """Copy the state in a slot to [slot_bytes] uint8 on the same device."""
        memory, conv = self._parts(packed)
        memory.copy_(self.memory[:, slot])
        conv.copy_(self.conv[:, slot])

    def unpack(self, packed: Tensor, slot: int) -> None:
        """Copy to a slot what `pack` has made."""
        memory, conv = self._parts(packed)
        self.memory[:, slot].copy_(memory)
        self.conv[:, slot].copy_(conv)

    def _parts(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        memory, conv = self.memory[:, 0], self.conv[:, 0]
        return (
            packed[: memory.nbytes].view(memory.dtype).view(memory.shape),
            packed[memory.nbytes :].view(conv.dtype).view(conv.shape),
        )


def new_slots(
    layers: LinearLayers | None, count: int, dtype: torch.dtype, device: str
) -> DeltaSlots:
    """Slots that hold the state before the first token; none without linear layers."""
    if layers is None or layers.count == 0:
        return DeltaSlots(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int32))
    inputs = (layers.count, count, layers.taps - 1, layers.channels)
    heads = (layers.count, count, layers.value_heads, layers.key_head_dim, layers.value_head_dim)
    return DeltaSlots(
        conv=torch.zeros(inputs, dtype=dtype, device=device),
        memory=torch.zeros(heads, dtype=torch.float32, device=device),
        arrived=torch.zeros(count, layers.key_heads, dtype=torch.int32, device=device),
    )
