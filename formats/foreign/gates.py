"""Linears that a tool has packed and no kernel reads packed: widened while they are read.

llm-compressor and AutoRound pack the two projections of a DeltaNet's gates, `in_proj_a` and
`in_proj_b`, where all linears are their targets. Both have as many rows as the layer has heads.
"""

import re
from dataclasses import replace

import torch
from torch import Tensor

from lowbit.formats.architectures import unpacked_modules
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import (
    PACKED,
    PACKED_DTYPES,
    SCALE,
    SHAPE,
    ZERO_POINT,
    dequantize,
    packed_shapes,
    unpack,
    unpack_zero_point,
)
from lowbit.formats.layout.quantization_config import read_quantization_config
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import Checkpoint, DerivedRows


def with_wide_gates(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with an FP32 weight, q * s, in place of every packed gate.

    Raises:
        FormatError: `quantization_config` is refused or does not cover a packed gate, or its
            tensors do not fit each other.
        QuantizationError: the group size does not divide a row.
    """
    patterns = [re.compile(pattern) for pattern in unpacked_modules(checkpoint.config)]
    names = [name.removesuffix(f".{PACKED}") for name in checkpoint.tensors if f".{PACKED}" in name]
    gates = [name for name in names if any(pattern.match(name) for pattern in patterns)]
    if not gates:
        return checkpoint
    quantization = read_quantization_config(checkpoint.config)
    tensors, derived = dict(checkpoint.tensors), dict(checkpoint.derived)
    for module in gates:
        scheme = None if quantization is None else quantization.scheme_for(module)
        if scheme is None:
            raise FormatError(
                f"`{module}` is packed, but config.json leaves it unquantized",
                hint="config.json and weights do not belong together",
            )
        N, K = _check(checkpoint, module, scheme)
        packed = tensors[f"{module}.{PACKED}"]
        for suffix in packed_shapes(N, K, scheme, module):
            tensors.pop(f"{module}.{suffix}")
        name = f"{module}.weight"
        tensors[name] = replace(
            packed, name=name, dtype=torch.float32, shape=(N, K), nbytes=4 * N * K
        )
        derived[name] = _rows(checkpoint, module, scheme, N, K)
    return replace(checkpoint, tensors=tensors, derived=derived)


def _check(checkpoint: Checkpoint, module: str, scheme: Scheme) -> tuple[int, int]:
    """Sizes N, K of a packed linear whose tensors fit each other."""
    stored = checkpoint.tensors.get(f"{module}.{SHAPE}")
    if stored is None or stored.shape != (2,) or stored.dtype not in PACKED_DTYPES[SHAPE]:
        raise FormatError(f"`{module}.{SHAPE}`: expected two integers")
    N, K = (int(size) for size in checkpoint.read(stored.name))
    if min(N, K) < 1:
        raise FormatError(f"`{module}.{SHAPE}`: expected two sizes, got {[N, K]}")
    for suffix, shape in packed_shapes(N, K, scheme, module).items():
        info = checkpoint.tensors.get(f"{module}.{suffix}")
        if info is None:
            raise FormatError(f"`{module}.{suffix}` is missing")
        if info.shape != shape or info.dtype not in PACKED_DTYPES[suffix]:
            raise FormatError(
                f"`{info.name}`: {info.dtype_name} {list(info.shape)} does not fit {scheme} of "
                f"[{N}, {K}]"
            )
    return N, K


def _rows(checkpoint: Checkpoint, module: str, scheme: Scheme, N: int, K: int) -> DerivedRows:
    """A function that makes rows of the wide weight."""

    def read(start: int, stop: int, device: torch.device) -> Tensor:
        words = checkpoint.read_rows(f"{module}.{PACKED}", start, stop)
        scale = checkpoint.read_rows(f"{module}.{SCALE}", start, stop)
        zero_point = None
        if not scheme.symmetric:  # packed along N
            stored = checkpoint.read(f"{module}.{ZERO_POINT}")
            zero_point = unpack_zero_point(stored, scheme.bits, N)[start:stop]
        return dequantize(unpack(words, scheme.bits, K), scale, zero_point).to(device)

    return read
