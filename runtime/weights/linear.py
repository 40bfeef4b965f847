"""Weights of linear layers as they are read, and of the MLPs and experts that are made of them.

A linear is packed codes with scales, or a dense weight. A backend makes its own form W of it
(`cpu_linear.prepare`, `cuda.prepare`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import FLOATS, dequantize, unpack

W = TypeVar("W", covariant=True)  # a backend's form of a linear


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weight [N, K] in the native layout of `formats.layout.packing`, checked once at load."""

    codes: Tensor  # [N, K * bits / 32] int32
    scales: Tensor  # [N, K / group_size] bfloat16, float16 or float32; may be negative
    bits: int  # 2, 3, 4 or 8
    group_size: int  # weights that share a scale; K where there is one scale per row

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


@dataclass(frozen=True, slots=True)
class MlpWeights(Generic[W]):
    """A gated MLP of width I."""

    gate_up: W  # [2 * I, h], gate rows first
    down: W  # [h, I]


@dataclass(frozen=True, slots=True)
class ExpertWeights(Generic[W]):
    """A mixture of E experts of width I; every token passes through some of them.

    Linears of experts have one shape and one scheme, so that a backend may keep them in one buffer,
    [E, 2 * I, h] and [E, h, I]. An item of the sequence is one expert's.
    """

    router: Tensor  # [E, h]; with a shared expert [E + 1, h], the last row is that expert's gate
    gate_up: Sequence[W]  # E of [2 * I, h], gate rows first, and then that of the shared expert
    down: Sequence[W]  # E of [h, I], and then that of the shared expert
    chosen: int  # experts of a token
    # the last expert is one that all tokens pass through, which may have another width and another
    # scheme
    shared: bool
    # the shares of a token's chosen experts sum to one; else each is its share in a softmax over
    # all experts
    normed: bool = True
