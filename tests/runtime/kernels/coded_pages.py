"""Pages of INT8 codes for attention."""

import torch
from torch import Tensor

from lowbit.formats.kv_cache import quantize_vectors
from lowbit.runtime.state.pages import KVPages

_BITS = (torch.int8, torch.int8, torch.int16, torch.int16)


def in_codes(pages: KVPages) -> KVPages:
    """Pages that hold the same in codes; rows of NaN have a scale of NaN."""
    k, k_scales = quantize_vectors(pages.k)
    v, v_scales = quantize_vectors(pages.v)
    return KVPages(k, v, k_scales, v_scales)


def bits(pages: KVPages) -> list[Tensor]:
    """All that the pages hold, where NaN equals itself."""
    return [each.view(dtype) for each, dtype in zip(pages.stores, _BITS, strict=True)]


def same(one: KVPages, other: KVPages) -> bool:
    """True if both hold the same, bit for bit."""
    return all(bool((a == b).all()) for a, b in zip(bits(one), bits(other), strict=True))
