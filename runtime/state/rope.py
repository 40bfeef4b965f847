"""Rotary position embedding: tables of cosines and sines."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.architectures.rope import Llama3Rope


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation tables, half-split pairing: cos, sin [T, r / 2] float32 for each position.

    The first r dimensions of a head are rotated, all D of them in most models.
    """

    cos: Tensor
    sin: Tensor


def rope_tables(
    positions: int, dim: int, theta: float, device: str, scaling: Llama3Rope | None = None
) -> Rope:
    """Tables for positions 0 to positions - 1; dim is the number of rotated dimensions.

    Angles are FP32 products, as the models were trained with.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / theta**exponents  # [dim / 2]
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return Rope(cos=angles.cos().to(device), sin=angles.sin().to(device))


def _scaled(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3: slow rotations divided by the factor, fast ones kept, a ramp between the two."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # over the old context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor
