"""Keys and values in pages that sequences are given as they grow."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.kv_cache import CACHE_TYPES, CacheType
from lowbit.formats.page_counts import PAGE


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys after norm and RoPE, and values, of all sequences.

    Position p of a sequence is token `p % PAGE` of the page that its block table names for
    `p // PAGE`. Where there are scales, k and v are codes; see `formats.kv_cache`.
    """

    k: Tensor  # [L, P, PAGE, Hkv, D]; L counts the layers that have keys, P the pages
    v: Tensor  # [L, P, PAGE, Hkv, D]
    # [L, P, PAGE, Hkv] bfloat16; None where k holds the keys themselves
    k_scales: Tensor | None = None
    # [L, P, PAGE, Hkv] bfloat16; None where v holds the values themselves
    v_scales: Tensor | None = None

    @property
    def quantized(self) -> bool:
        """True if pages hold codes and their scales."""
        return self.k_scales is not None

    @property
    def stores(self) -> tuple[Tensor, ...]:
        """All tensors, [L, P, PAGE, Hkv, ...] each."""
        parts = (self.k, self.v, self.k_scales, self.v_scales)
        return tuple(part for part in parts if part is not None)

    @property
    def count(self) -> int:
        """Pages, the scratch page included."""
        return self.k.shape[1]

    @property
    def heads(self) -> int:
        """Hkv."""
        return self.k.shape[3]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.k.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        """Type of a stored number, whatever that of activations is."""
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.k.device

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and the value of a token in one layer."""
        return sum(store.shape[3:].numel() * store.itemsize for store in self.stores)

    @property
    def size_bytes(self) -> int:
        """Memory of all pages."""
        return sum(store.nbytes for store in self.stores)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as kernels take them, [P, PAGE, Hkv, D] each."""
        return self.k[index], self.v[index]

    def layer_scales(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Scales of the keys and values of a layer, [P, PAGE, Hkv] each; None without scales."""
        if self.k_scales is None or self.v_scales is None:
            return None
        return self.k_scales[index], self.v_scales[index]

    def copy(self, source: int, target: int) -> None:
        """Copy a page to another in all layers."""
        for store in self.stores:
            store[:, target].copy_(store[:, source])


def new_pages(
    layers: int, count: int, heads: int, head_dim: int, cache_type: CacheType, device: str
) -> KVPages:
    """Pages of zeros."""
    if cache_type not in CACHE_TYPES:
        raise ValueError(f"pages of {cache_type}, expected one of {CACHE_TYPES}")
    vectors = (layers, count, PAGE, heads)
    k, v = (
        torch.zeros(*vectors, head_dim, dtype=cache_type.dtype, device=device) for _ in range(2)
    )
    if not cache_type.scaled:
        return KVPages(k, v)
    scales = [torch.zeros(vectors, dtype=torch.bfloat16, device=device) for _ in range(2)]
    return KVPages(k, v, *scales)
