"""A linear layer as it is read: packed codes with scales, or a dense weight.

A backend makes its own form of it (`cpu_linear.prepare`, `cuda.prepare`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import FLOATS, dequantize, unpack


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weight [N, K] in the native layout of `lowbit.formats.layout.packing`, checked once at load.

    Attributes:
        codes: [N, K * bits / 32] int32.
        scales: [N, K / group_size] bfloat16, float16 or float32; may be negative.
        bits: 4 or 8.
        group_size: weights that share a scale; K where there is one scale per row.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        """Refuse buffers whose shapes or dtypes the kernels would misread."""
        N, words = self.codes.shape
        K = words * 32 // self.bits
        if self.codes.dtype != torch.int32 or self.scales.dtype not in FLOATS:
            raise FormatError(
                "packed linear: expected int32 codes and 16- or 32-bit float scales, got "
                f"{self.codes.dtype} and {self.scales.dtype}"
            )
        if K % self.group_size or tuple(self.scales.shape) != (N, K // self.group_size):
            raise FormatError(
                f"packed linear: scales of shape {tuple(self.scales.shape)} do not fit "
                f"[{N}, {K}] in groups of {self.group_size}"
            )

    @property
    def N(self) -> int:  # noqa: N802 - the name of the dimension
        """Outputs."""
        return self.codes.shape[0]

    @property
    def K(self) -> int:  # noqa: N802
        """Inputs."""
        return self.codes.shape[1] * 32 // self.bits

    @property
    def size_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantized(self) -> Tensor:
        """The weight as [N, K] float32, exactly `code * scale`."""
        return dequantize(unpack(self.codes, self.bits, self.K), self.scales)


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Weight [N, K] in a float dtype."""

    weight: Tensor

    @property
    def N(self) -> int:  # noqa: N802
        """Outputs."""
        return self.weight.shape[0]

    @property
    def K(self) -> int:  # noqa: N802
        """Inputs."""
        return self.weight.shape[1]

    @property
    def size_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return self.weight.nbytes

    def dequantized(self) -> Tensor:
        """The weight as [N, K] float32."""
        return self.weight.to(torch.float32)


Linear = PackedLinear | DenseLinear
