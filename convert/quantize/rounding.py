"""Weights rounded to a scheme and read back."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lowbit.convert.original.threads import Pool, for_each
from lowbit.convert.original.walk import blocks
from lowbit.formats.layout.packing import dequantize
from lowbit.formats.layout.rtn import ScaleRule, Search, quantize
from lowbit.formats.layout.scheme import Scheme

BLOCK_WEIGHTS = {"cpu": 1 << 18, "cuda": 1 << 26}  # rounded at a time, by every CPU thread


def rounding_error(weight: Tensor, scheme: Scheme, rule: ScaleRule) -> Tensor:
    """Rounded weight less the weight itself: [N, K] float32."""
    codes, scale = quantize(weight, scheme, rule, search_on(weight.device, scheme))
    return dequantize(codes, scale).sub_(weight)


def row_blocks(weight: Tensor) -> Iterable[slice]:
    """Rows of a weight [N, K] to round at a time."""
    return blocks(len(weight), max(1, BLOCK_WEIGHTS[weight.device.type] // weight.shape[1]))


def rounding_error_on(pool: Pool, weight: Tensor, scheme: Scheme, rule: ScaleRule) -> Tensor:
    """`rounding_error` on all threads of a pool."""
    out = torch.empty_like(weight)

    def fill(rows: slice) -> None:
        out[rows] = rounding_error(weight[rows], scheme, rule)

    for_each(pool, fill, row_blocks(weight))
    return out


def search_on(device: torch.device, scheme: Scheme) -> Search | None:
    """A kernel that gives the same scales as `search_scales`; None for that itself."""
    G = scheme.group_size
    if device.type == "cpu" or G is None or G & (G - 1):
        return None
    from lowbit.convert.quantize import search_cuda

    return search_cuda.search
