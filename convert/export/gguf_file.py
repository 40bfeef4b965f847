"""GGUF files, version 3: the header by ggml's own library, tensors streamed behind it in blocks.

Blocks of packed weights are 32 weights of a row with one FP16 scale. Q4_0: d, then 16 bytes whose
low nibbles are elements 0-15 and whose high nibbles are 16-31; `W = d * (u - 8)`. Q8_0: d, then 32
int8; `W = d * q`. d may be negative in both.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lowbit.convert.export.outputs import Blocks, write_blocks
from lowbit.convert.original.progress import Advance
from lowbit.formats.safetensors.checkpoint import read_at

if TYPE_CHECKING:
    from gguf import GGUFValueType

ARCHITECTURE = "general.architecture"

GgmlType = Literal["F32", "F16", "BF16", "Q4_0", "Q8_0"]
# Weights per block, bytes per block.
KINDS: Mapping[GgmlType, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "Q4_0": (32, 18),
    "Q8_0": (32, 34),
    "BF16": (1, 2),
}
DENSE: Mapping[torch.dtype, GgmlType] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
DTYPES: Mapping[GgmlType, torch.dtype] = {kind: dtype for dtype, kind in DENSE.items()}
BLOCK = 32  # weights of a block that is packed
KIND_OF_BITS: dict[int, GgmlType] = {4: "Q4_0", 8: "Q8_0"}

# A metadata value; an integer is an unsigned 32-bit one, a list of integers signed ones.
Value = int | float | bool | str | list[int] | list[str] | list[bool]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor to write; `shape` is in torch's order, the innermost dimension last."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    blocks: Blocks

    @property
    def nbytes(self) -> int:
        """Length of the data in bytes."""
        weights, nbytes = KINDS[self.kind]
        return math.prod(self.shape) // weights * nbytes


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """Type, shape and position of a tensor in a file."""

    kind: GgmlType
    shape: tuple[int, ...]
    offset: int


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Sequence[GgufTensor], advance: Advance
) -> tuple[int, dict[str, GgufPlace]]:
    """Write a file, tensor after tensor; its size in bytes, and where each tensor stands.

    Args:
        metadata: values by key, the name of the architecture among them.

    Raises:
        FormatError: blocks that do not add up to their tensor.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    places = {}
    with closing(GGUFWriter(path, str(metadata[ARCHITECTURE]))) as writer:
        for key, value in metadata.items():
            if key != ARCHITECTURE:
                writer.add_key_value(key, value, _type_of(value))
        for tensor in tensors:
            kind = GGMLQuantizationType[tensor.kind]
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        [file] = writer.fout
        writer.write_padding(file, file.tell())
        for tensor in tensors:
            places[tensor.name] = GgufPlace(tensor.kind, tensor.shape, file.tell())
            write_blocks(file, tensor.blocks(), tensor.name, tensor.nbytes, advance)
            writer.write_padding(file, tensor.nbytes)
        return file.tell(), places


def _type_of(value: Value) -> "GGUFValueType":
    from gguf import GGUFValueType

    found = GGUFValueType.get_type(value)
    return GGUFValueType.UINT32 if found == GGUFValueType.INT32 else found


def read_rows(path: Path, place: GgufPlace, start: int, stop: int) -> Tensor:
    """Rows of a matrix: values, or for a quantized one bytes [rows, blocks, bytes of a block].

    The rows of a stack of matrices count through.
    """
    K = place.shape[-1]
    weights, nbytes = KINDS[place.kind]
    row = K // weights * nbytes
    dtype = DTYPES.get(place.kind)
    if dtype is None:
        out = torch.empty(stop - start, K // weights, nbytes, dtype=torch.uint8)
    else:
        out = torch.empty(stop - start, K, dtype=dtype)
    read_at(path, place.offset + start * row, out)
    return out


def encode(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Encode rows of codes and scales as blocks: [rows, K / 32, 18 or 34] uint8.

    Args:
        codes: [rows, K] int8, signed.
        scales: [rows, K / 32], exact in FP16.
    """
    rows, K = codes.shape
    d = scales.to(torch.float16).contiguous().view(torch.uint8).view(rows, K // BLOCK, 2)
    if bits == 8:
        q = codes.contiguous().view(torch.uint8).view(rows, K // BLOCK, BLOCK)
        return torch.cat((d, q), dim=2)
    u = (codes + 8).view(torch.uint8).view(rows, K // BLOCK, 2, BLOCK // 2)
    return torch.cat((d, u[:, :, 0] | (u[:, :, 1] << 4)), dim=2)


def decode(blocks: Tensor, kind: GgmlType) -> tuple[Tensor, Tensor]:
    """Decode blocks into signed codes [rows, K] int8 and scales [rows, K / 32] float32."""
    rows = len(blocks)
    d = blocks[:, :, :2].contiguous().view(torch.float16).squeeze(2).to(torch.float32)
    q = blocks[:, :, 2:]
    if kind == "Q8_0":
        return q.contiguous().view(torch.int8).view(rows, -1), d
    low, high = (q & 0xF).to(torch.int8), (q >> 4).to(torch.int8)
    return torch.cat((low, high), dim=2).view(rows, -1) - 8, d
