"""The static KV cache: allocated once for the whole context, written in place."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class KVCache:
    """Keys after norm and RoPE, and values, of one sequence.

    Attributes:
        k: [L, Hkv, T, D], T the context.
        v: [L, Hkv, T, D].
        length: tokens held, as the host knows it (prefill slices by it).
        position: [1] int32 on the device, the row the next decoded token takes; decode kernels
            read it, so a captured graph follows the sequence without the host.
    """

    k: Tensor
    v: Tensor
    length: int
    position: Tensor

    @property
    def context(self) -> int:
        """Tokens the cache can hold."""
        return self.k.shape[2]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; later rows are overwritten when reached."""
        self.length = length
        self.position.fill_(length)


def cache_bytes(layers: int, kv_heads: int, head_dim: int, context: int, itemsize: int) -> int:
    """Bytes of a cache, before it is made."""
    return 2 * layers * kv_heads * context * head_dim * itemsize


def new_cache(
    layers: int, kv_heads: int, head_dim: int, context: int, dtype: torch.dtype, device: str
) -> KVCache:
    """An empty cache of the given sizes."""
    shape = (layers, kv_heads, context, head_dim)
    return KVCache(
        k=torch.zeros(shape, dtype=dtype, device=device),
        v=torch.zeros(shape, dtype=dtype, device=device),
        length=0,
        position=torch.zeros(1, dtype=torch.int32, device=device),
    )
