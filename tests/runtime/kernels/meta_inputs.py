"""Inputs without data for the launches that `test_compile` records."""

from typing import Any

import torch
from torch import Tensor


def zeros(*shape: int) -> Tensor:
    """Activations of a shape."""
    return torch.empty(shape, dtype=torch.bfloat16)


def weight(
    bits: int, N: int, K: int, G: int = 128, paired: bool = False, activations: Any = "exact"
) -> Any:
    """A packed linear as the GPU keeps it."""
    from lowbit.runtime.backends import cuda
    from lowbit.runtime.weights.linear import PackedLinear

    codes = torch.empty((N, K * bits // 32), dtype=torch.int32)
    return cuda.prepare(PackedLinear(codes, zeros(N, K // G), bits, G), paired, activations)


def tiled_experts(
    bits: int, E: int, N: int, K: int, paired: bool = False, activations: Any = "exact"
) -> Any:
    """Packed linears of experts as the GPU keeps them."""
    from lowbit.runtime.kernels.experts.tiled import gathered

    def read(first: int, stop: int) -> Any:
        return weight(bits, (stop - first) * N, K, paired=paired, activations=activations)

    return gathered(read, E)


def step_of(
    sequences: int, tokens: int, prompt: bool = False, reach: int = 1, first: int = 0
) -> Any:
    """A step without numbers, of as many tokens of each sequence."""
    from lowbit.runtime.state.step import Span, Step

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32)

    each = tokens // sequences
    return Step(
        positions=numbers(tokens),
        rows=numbers(tokens),
        starts=numbers(sequences + 1),
        tables=numbers(sequences, 512),
        read=numbers(sequences),
        write=numbers(tokens),
        max_kv_len=reach,
        longest=each,
        spans=tuple(Span(row, first, each) for row in range(sequences)),
        prompt=prompt,
    )
