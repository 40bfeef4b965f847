"""The scale search that a device has."""

import torch

from lowbit.formats.layout.rtn import Search
from lowbit.formats.layout.scheme import Scheme


def search_on(device: torch.device, scheme: Scheme) -> Search | None:
    """A kernel that gives the same scales as `search_scales`; None for that itself."""
    G = scheme.group_size
    if device.type == "cpu" or G is None or G & (G - 1):
        return None
    from lowbit.convert.plan import search_cuda

    return search_cuda.search
