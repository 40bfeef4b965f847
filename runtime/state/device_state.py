"""Keys, values and recurrent states of all sequences, and the sizes that they are made by."""

from dataclasses import dataclass

import torch

from lowbit.formats.architectures.config import Config
from lowbit.formats.kv_cache import CacheType, plain_cache
from lowbit.formats.page_counts import EXTRA
from lowbit.runtime.state.delta import DeltaSlots, new_slots
from lowbit.runtime.state.pages import KVPages, new_pages


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of the cache."""

    context: int  # most tokens of a sequence
    sequences: int  # that are decoded together
    pages: int  # for the keys and values of all of them and of prefixes to reuse
    snapshots: int  # most recurrent states that the host keeps for later prompts
    drafts: int = 0  # most of one step, and so the number of spare recurrent states

    @property
    def rows(self) -> int:
        """Rows of the sampler and of block tables, SCRATCH included."""
        return 1 + self.sequences

    @property
    def all_pages(self) -> int:
        """Pages with those that hold no tokens, see EXTRA."""
        return EXTRA + self.pages

    @property
    def slots(self) -> int:
        """Recurrent states: of each row, then after drafts."""
        return self.rows + self.drafts


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Keys, values and recurrent states of all sequences."""

    pages: KVPages  # keys and values
    slots: DeltaSlots  # states of linear layers; slot SCRATCH belongs to nobody

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.pages.device

    @property
    def recurrent(self) -> bool:
        """True if the model has linear layers."""
        return self.slots.count > 0

    @property
    def size_bytes(self) -> int:
        """Memory of all pages and slots."""
        return self.pages.size_bytes + self.slots.size_bytes


def new_state(
    config: Config,
    pages: int,
    slots: int,
    dtype: torch.dtype,
    device: str,
    cache_type: CacheType | None = None,
    head: bool = False,
) -> DeviceState:
    """Empty pages and slots of a model.

    Args:
        slots: to make; none where the model has no linear layers.
        dtype: of activations, in which the recurrent states keep the convolution's inputs.
        device: where they lie; `meta` to find out their size.
        head: make room for the layer of the head for multi-token prediction.
    """
    return DeviceState(
        kv_pages(config, pages, cache_type or plain_cache(dtype), device, head),
        new_slots(config.linear_layers, slots, dtype, device),
    )


def kv_pages(
    config: Config, count: int, cache_type: CacheType, device: str, head: bool = False
) -> KVPages:
    """Empty pages of a model, or of a drafter; see `new_state`."""
    layers, heads = config.kv_layers + head, config.num_key_value_heads
    return new_pages(layers, count, heads, config.head_dim, cache_type, device)


def head_pages(config: Config, count: int, cache_type: CacheType, device: str) -> KVPages:
    """Empty pages of a head for multi-token prediction that has pages of its own."""
    return new_pages(1, count, config.num_key_value_heads, config.head_dim, cache_type, device)
