"""Rotary position embedding: tables of cosines and sines."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.architectures.frequencies import attention_factor, rope_frequencies
from lowbit.formats.architectures.rope import RopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation tables, half-split pairing: cos, sin [T, r / 2] float32 for each position.

    The first r dimensions of a head are rotated, all D of them in most models. With YaRN both
    tables are multiplied by its attention factor, so that no kernel knows of it.
    """

    cos: Tensor
    sin: Tensor


def rope_tables(
    positions: int, dim: int, theta: float, device: str, scaling: RopeScaling | None = None
) -> Rope:
    """Tables for positions 0 to positions - 1; dim is the number of rotated dimensions.

    Angles are FP32 products, as the models were trained with.
    """
    frequencies = rope_frequencies(dim, theta, scaling)  # [dim / 2]
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    factor = attention_factor(scaling)
    return Rope(cos=(angles.cos() * factor).to(device), sin=(angles.sin() * factor).to(device))
