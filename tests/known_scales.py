"""Scales of weights that were searched for before, by what is searched."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.layout.rtn import search_scales

LEAST = 4096  # elements of weights for which it is worth it


@dataclass(frozen=True)
class Scales:
    """`search_scales` that remembers; from several threads at once one may search for itself."""

    known: dict[bytes, Tensor] = field(default_factory=dict)

    def of(self, w: Tensor, extreme: Tensor, half: int, importance: Tensor | None) -> Tensor:
        """Scales by `search_scales`, of its own arguments."""
        if w.device.type != "cpu" or w.numel() < LEAST:
            return search_scales(w, extreme, half, importance)
        key = digest(w, extreme, importance, torch.tensor(half))
        if key not in self.known:
            self.known[key] = search_scales(w, extreme, half, importance)
        return self.known[key].clone()


def digest(*tensors: Tensor | None) -> bytes:
    """A hash of shapes and contents."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(str(None if tensor is None else tensor.shape).encode())
        if tensor is not None:
            content: Any = tensor.contiguous().numpy()
            found.update(content)
    return found.digest()
