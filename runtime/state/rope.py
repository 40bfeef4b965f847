"""Rotary position embedding: tables of cosines and sines.

The frequencies are bit for bit those of transformers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.architectures.rope import Llama3Rope, RopeScaling, YarnRope
from lowbit.runtime.images.positions import axis_of_pairs


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


def rope_by_axes(rope: Rope, axes: Tensor, sections: Sequence[int]) -> Rope:
    """Tables with a row for each of M tokens, each pair of dimensions turned by its own axis.

    Args:
        axes: [3, M] int64 on the device of the tables, positions of the tokens.
        sections: pairs by axis; see `axis_of_pairs`.
    """
    chosen = axis_of_pairs(sections, rope.cos.shape[1], axes.device)
    positions = axes[chosen].T  # [M, r / 2]
    return Rope(cos=rope.cos.gather(0, positions), sin=rope.sin.gather(0, positions))


def rope_frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Angle by which each pair of dimensions turns from one position to the next.

    Args:
        dim: rotated dimensions of a head, r.

    Returns:
        [r / 2] float32, fastest first.
    """
    periods = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if isinstance(scaling, YarnRope):
        return _yarn(periods, dim, theta, scaling)
    frequencies = 1.0 / periods
    return frequencies if scaling is None else _llama3(frequencies, scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Factor of cosines and sines: 1 except with YaRN."""
    return scaling.attention_factor if isinstance(scaling, YarnRope) else 1.0


def _llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Slow rotations divided by the factor, fast ones kept, a ramp between the two."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # over the old context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _yarn(periods: Tensor, dim: int, theta: float, scaling: YarnRope) -> Tensor:
    """As `_llama3`, with a ramp that is linear in the number of the pair."""

    def pair_of(turns: float) -> float:
        """The pair, as a fraction, that makes so many turns over the old context."""
        length = scaling.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - ramp
    # Both products are spelled as transformers does, which decides their last bit.
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
