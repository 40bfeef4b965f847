"""Keys and values as INT8: one scale for each vector of a token and kv head. The reference.

x is a vector of D numbers: a key after norm and RoPE, or a value. With all arithmetic in FP32,
`scale = max|x| / 127`, rounded up to BF16, `code = rint(x / scale)` with halves to even, and the
cache holds `code * scale`. The scale never is too small, so codes stay within -127 to 127 and the
error within scale / 2.

A vector of zeros has scale 0 and codes 0. A vector with NaN or an infinity has that scale and codes
0, so all of it is NaN when it is read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_CODE = 127
_BF16_BITS = 16  # low bits of an FP32 number that BF16 lacks


@dataclass(frozen=True, slots=True)
class CacheType:
    """Type of the keys and values in a cache."""

    name: str  # as users write it
    dtype: torch.dtype  # of a stored number
    # each vector of a token and kv head has a BF16 scale, and its numbers are codes
    scaled: bool = False

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of a key, or of a value, of one token and kv head."""
        return head_dim * self.dtype.itemsize + self.scaled * torch.bfloat16.itemsize


BF16_CACHE = CacheType("bf16", torch.bfloat16)
FP32_CACHE = CacheType("fp32", torch.float32)
INT8_CACHE = CacheType("int8", torch.int8, scaled=True)
CACHE_TYPES = (BF16_CACHE, FP32_CACHE, INT8_CACHE)


def plain_cache(dtype: torch.dtype) -> CacheType:
    """The type that stores numbers as they are.

    Raises:
        ValueError: no cache stores this dtype.
    """
    for each in CACHE_TYPES:
        if each.dtype == dtype and not each.scaled:
            return each
    raise ValueError(f"no cache stores {dtype} as it is")


def quantize_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of vectors.

    Args:
        x: [..., D] BF16 or FP32.

    Returns:
        [..., D] int8 codes and [...] bfloat16 scales.
    """
    wide = x.float()
    scales = _round_up(wide.abs().amax(-1) / LARGEST_CODE)
    ratio = wide / scales.float()[..., None]
    # No code is left where the scale is 0 or not finite: 0 * inf then is NaN, too.
    return ratio.round().nan_to_num(0, 0, 0).to(torch.int8), scales


def widen_vectors(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers that a cache holds: [..., D] float32.

    Args:
        codes: [..., D] int8.
        scales: [...] bfloat16.
    """
    return codes.float().mul_(scales.float()[..., None])


def _round_up(x: Tensor) -> Tensor:
    """The least BF16 number that is not below x: x is FP32, not negative; NaN stays NaN."""
    bits = x.contiguous().view(torch.int32).to(torch.int64) + ((1 << _BF16_BITS) - 1)
    rounded = (bits >> _BF16_BITS << _BF16_BITS).to(torch.int32).view(torch.float32)
    return torch.where(x.isnan(), torch.nan, rounded).to(torch.bfloat16)
