"""Keys and values in pages that sequences are given as they grow."""

from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 64  # tokens
SCRATCH = 0  # the page that tokens of no sequence are written to; it belongs to nobody
EXTRA = 2  # pages beyond those for tokens: SCRATCH, and one for the copy of a page that goes on


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys after norm and RoPE, and values, of all sequences.

    Position p of a sequence is token `p % PAGE` of the page that its block table names for
    `p // PAGE`.

    Attributes:
        k: [L, P, PAGE, Hkv, D]; L counts the layers that have keys, P the pages.
        v: [L, P, PAGE, Hkv, D].
    """

    k: Tensor
    v: Tensor

    @property
    def count(self) -> int:
        """Pages, the scratch page included."""
        return self.k.shape[1]


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)


def new_pages(
    layers: int, count: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> KVPages:
    """Pages of zeros."""
    shape = (layers, count, PAGE, kv_heads, head_dim)
    return KVPages(
        k=torch.zeros(shape, dtype=dtype, device=device),
        v=torch.zeros(shape, dtype=dtype, device=device),
    )
