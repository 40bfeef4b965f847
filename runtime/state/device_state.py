"""Everything that sequences leave on the device between two steps."""

from dataclasses import dataclass

import torch

from lowbit.runtime.state.delta import DeltaSlots
from lowbit.runtime.state.pages import KVPages


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Keys, values and recurrent states of all sequences.

    Attributes:
        pages: keys and values.
        slots: states of linear layers; slot SCRATCH belongs to nobody.
    """

    pages: KVPages
    slots: DeltaSlots

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.pages.k.device

    @property
    def recurrent(self) -> bool:
        """True if the model has linear layers."""
        return self.slots.count > 0

    @property
    def size_bytes(self) -> int:
        """Memory of all pages and slots."""
        pages, slots = self.pages, self.slots
        return pages.k.nbytes + pages.v.nbytes + slots.conv.nbytes + slots.memory.nbytes
