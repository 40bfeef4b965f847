"""Keys and values in pages that sequences are given as they grow."""

from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 64  # tokens
SCRATCH = 0  # the page that tokens of no sequence are written to; it belongs to nobody
KV_DTYPES = (torch.bfloat16, torch.float32)  # of the keys and values in pages
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
        return 2 * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Memory of all pages."""
        return self.k.nbytes + self.v.nbytes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as kernels take them, [P, PAGE, Hkv, D] each."""
        return self.k[index], self.v[index]

    def copy(self, source: int, target: int) -> None:
        """Copy a page to another in all layers."""
        for store in (self.k, self.v):
            store[:, target].copy_(store[:, source])


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)


def new_pages(
    layers: int, count: int, heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> KVPages:
    """Pages of zeros.

    Args:
        layers: that have keys and values.
        count: of pages.
        heads: Hkv.
        head_dim: D.
        dtype: of a stored number, one of KV_DTYPES.
        device: where the pages lie.
    """
    if dtype not in KV_DTYPES:
        raise ValueError(f"pages of {dtype}, expected one of {KV_DTYPES}")
    shape = (layers, count, PAGE, heads, head_dim)
    return KVPages(
        k=torch.zeros(shape, dtype=dtype, device=device),
        v=torch.zeros(shape, dtype=dtype, device=device),
    )
