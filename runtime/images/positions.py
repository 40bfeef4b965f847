"""Positions on three axes (time, row, column) of a prompt's tokens, by Qwen3.5's rule.

Text counts on all three axes alike. The tokens of an image share one time; row and column count
from there. Text goes on after the longer side of the image, not after the number of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Span(Protocol):
    """Image tokens of a prompt, row by row."""

    @property
    def start(self) -> int:
        """Index of the first image token in the prompt."""

    @property
    def rows(self) -> int:
        """Rows of image tokens."""

    @property
    def columns(self) -> int:
        """Image tokens in a row."""


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Positions of the tokens of a prompt, and of all that follow."""

    axes: Tensor  # [3, T] int64: time, row and column of each token
    delta: int  # a token after the prompt has its index plus this as position on all axes


def positions_of(ids_length: int, spans: Sequence[Span] = ()) -> PromptPositions:
    """Positions of a prompt of `ids_length` tokens.

    Args:
        ids_length: tokens of the prompt, image tokens included.
        spans: its images in the order of their tokens.

    Raises:
        ValueError: spans that overlap, or reach beyond the prompt.
    """
    axes = torch.empty(3, ids_length, dtype=torch.int64)
    index = position = 0  # of the next token
    for span in spans:
        stop = span.start + span.rows * span.columns
        if not index <= span.start < stop <= ids_length:
            raise ValueError(
                f"an image has tokens {span.start} to {stop}, expected a place from {index} to "
                f"{ids_length}"
            )
        axes[:, index : span.start] = torch.arange(position, position + span.start - index)
        position += span.start - index
        grid = axes[:, span.start : stop].view(3, span.rows, span.columns)
        grid[0] = position
        grid[1] = torch.arange(position, position + span.rows)[:, None]
        grid[2] = torch.arange(position, position + span.columns)
        position += max(span.rows, span.columns)
        index = stop
    axes[:, index:] = torch.arange(position, position + ids_length - index)
    return PromptPositions(axes, position - index)


def axis_of_pairs(
    sections: Sequence[int], pairs: int, device: torch.device | None = None
) -> Tensor:
    """Axis whose positions turn each pair of rotated dimensions: [pairs] int64 of 0, 1 and 2.

    Axes are interleaved. Every third pair from 1 on takes the row and from 2 on the column, as
    many as their section counts; all others take the time.

    Args:
        sections: pairs of time, row and column, `mrope_section` of config.json.
        pairs: half of the rotated dimensions of a head.
        device: of the result, which is made there, without a copy; None for the CPU.
    """
    axes = torch.zeros(pairs, dtype=torch.int64, device=device)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
