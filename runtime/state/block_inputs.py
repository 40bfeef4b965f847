"""Inputs of the blocks of a drafter, which a round writes on the device from its last tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNED = 4  # numbers: 16 bytes, see `step_buffers.PADDING`


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """A block of `size` tokens of each of B sequences, side by side, and drafts k of each.

    A block is the last token of its sequence and mask tokens behind it.
    """

    mask: int  # mask token
    size: int  # tokens of a block
    ids: Tensor  # [W] int32 of the tokens
    positions: Tensor  # [W] int32 of them
    rows: Tensor  # [W] int32 of their sequences
    draft_positions: Tensor  # [W] int32, of the tokens behind which drafts stand
    draft_rows: Tensor  # [W] int32, of the drafts' sequences


def new_block_inputs(mask: int, size: int, sequences: int, device: torch.device) -> BlockInputs:
    """Zeros for a block of each of so many sequences."""
    wide = -(-sequences * size // ALIGNED) * ALIGNED
    return BlockInputs(mask, size, *torch.zeros(5, wide, dtype=torch.int32, device=device))
