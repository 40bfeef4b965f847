"""AWQ files in the GEMM layout, as AutoAWQ, AutoRound and GPTQModel write them.

`qweight` [K, N / 8] holds the codes of 8 neighbouring outputs in a word, and `qzeros` [K/G, N / 8]
their zero points: nibble i of word c belongs to output 8 * c + (0, 2, 4, 6, 1, 3, 5, 7)[i].
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.errors import FormatError
from lowbit.formats.foreign.native import (
    CODES,
    ZEROS,
    ForeignLinear,
    as_native,
    matrix,
    packed_modules,
    read_columns,
    read_scheme,
)
from lowbit.formats.safetensors.checkpoint import Checkpoint

NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of word c that holds output 8 * c + j
BITS = 4
OFFSET = 8  # difference of unsigned and signed codes and zero points


def read_awq(checkpoint: Checkpoint, section: Mapping[str, Any]) -> Checkpoint:
    """Translate an AWQ checkpoint into the native layout.

    Raises:
        FormatError: another layout, bits other than 4, or tensors that do not fit.
        QuantizationError: the group size does not divide K.
    """
    version = section.get("version", section.get("format", "gemm"))
    if not isinstance(version, str) or version.lower() != "gemm":
        raise FormatError(
            f"config.json: AWQ version `{version}` is not supported", hint="read: gemm"
        )
    scheme = read_scheme(section, "config.json: AWQ")
    if scheme.bits != BITS:
        raise FormatError(f"config.json: AWQ with {scheme.bits} bits is not supported, only {BITS}")

    def linear(module: str) -> ForeignLinear:
        name = f"{module}.{CODES}"
        K, words = matrix(checkpoint, name, (torch.int32,)).shape

        def codes(start: int, stop: int, device: torch.device) -> Tensor:
            first = start // 8
            stored = read_columns(checkpoint, name, first, -(-stop // 8))
            return native_words(stored.to(device))[start - first * 8 : stop - first * 8]

        def zero_points() -> Tensor:
            return _outputs(checkpoint.read(f"{module}.{ZEROS}"))

        return ForeignLinear(module, words * 8, K, scheme, codes, zero_points)

    return as_native(checkpoint, [linear(module) for module in packed_modules(checkpoint)])


def native_words(stored: Tensor) -> Tensor:
    """Turn words of 8 outputs, [K, C] int32, into words along K: [C * 8, K / 8] int32.

    Byte b of a word holds the outputs 4 * b0 + b1 and 4 * b0 + b1 + 2, where b = 2 * b1 + b0, and
    a byte of a native word the codes of one output at an even and the next odd k.
    """
    K, C = stored.shape
    pairs = stored.T.contiguous().view(torch.uint8).view(C, K // 2, 2, 4)
    even, odd = pairs[:, :, 0], pairs[:, :, 1]
    low = (even & 0x0F) | (odd << 4)
    high = (even >> 4) | (odd & 0xF0)
    rows = torch.stack((low, high), dim=-1).view(C, K // 2, 2, 2, 2)  # [C, K / 2, b1, b0, half]
    return rows.permute(0, 3, 4, 2, 1).contiguous().view(C * 8, K // 2).view(torch.int32)


def _outputs(words: Tensor) -> Tensor:
    """Unpack zero points in the order of the outputs: [R, C] int32 to [R, C * 8] int8, signed."""
    zeros = torch.stack([(words >> (nibble * BITS)) & 0xF for nibble in NIBBLES], dim=-1)
    return zeros.view(words.shape[0], -1).to(torch.int8) - OFFSET
