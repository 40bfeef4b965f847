"""Lookup tables: an embedding whose rows are read by token id, dense or in packed INT8 codes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import FLOATS

CODE_BYTES = 4  # codes of a word
ZERO_CODE = 128  # stored code of a weight of zero


@dataclass(frozen=True, slots=True)
class PackedTable:
    """Rows [V, h] as INT8 codes in the layout of `formats.layout.packing`."""

    codes: Tensor  # [V, h / 4] int32
    scales: Tensor  # [V, h / G] bfloat16, float16 or float32; may be negative
    dtype: torch.dtype  # of the rows that a lookup gives

    def __post_init__(self) -> None:
        """Refuse buffers whose shapes or dtypes a lookup would misread."""
        V, h = self.shape
        fits = self.scales.ndim == 2 and self.scales.shape[0] == V and self.scales.shape[1] > 0
        if self.codes.dtype != torch.int32 or self.scales.dtype not in FLOATS:
            raise FormatError(
                "packed table: expected int32 codes and 16- or 32-bit float scales, got "
                f"{self.codes.dtype} and {self.scales.dtype}"
            )
        if not fits or h % self.scales.shape[1]:
            raise FormatError(
                f"packed table: scales of shape {tuple(self.scales.shape)} do not fit [{V}, {h}]"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and numbers of a row: V, h."""
        return self.codes.shape[0], self.codes.shape[1] * CODE_BYTES

    @property
    def device(self) -> torch.device:
        """Device of codes and scales."""
        return self.codes.device

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of some ids [M]: [M, h], `code * scale` in FP32, rounded to the dtype once."""
        scales = self.scales[ids].to(torch.float32)
        codes = self.codes[ids].view(torch.uint8).to(torch.float32) - ZERO_CODE
        grouped = codes.view(*scales.shape, self.group_size) * scales[..., None]
        return grouped.flatten(1).to(self.dtype)


Table = Tensor | PackedTable
