"""The GGUF container, version 3: typed metadata, tensor infos, then data at multiples of 32 bytes.

Source: the specification in ggml's docs/gguf.md. Everything is little-endian; dimensions are
written innermost first.

Blocks of packed weights are 32 weights of a row with one FP16 scale. Q4_0: d, then 16 bytes whose
low nibbles are elements 0-15 and whose high nibbles are 16-31; `W = d * (u - 8)`. Q8_0: d, then 32
int8; `W = d * q`. d may be negative in both.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import torch
from torch import Tensor

from lowbit.convert.export.outputs import Blocks, write_blocks
from lowbit.convert.original.progress import Advance
from lowbit.formats.errors import FormatError
from lowbit.formats.safetensors.checkpoint import read_at

MAGIC, VERSION = b"GGUF", 3
ALIGNMENT = 32

GgmlType = Literal["F32", "F16", "BF16", "Q4_0", "Q8_0"]
# Type number in the file, weights per block, bytes per block.
KINDS: Mapping[GgmlType, tuple[int, int, int]] = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q8_0": (8, 32, 34),
    "BF16": (30, 1, 2),
}
DENSE: Mapping[torch.dtype, GgmlType] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
DTYPES: Mapping[GgmlType, torch.dtype] = {kind: dtype for dtype, kind in DENSE.items()}
BLOCK = 32  # weights of a block that is packed
KIND_OF_BITS: dict[int, GgmlType] = {4: "Q4_0", 8: "Q8_0"}


@dataclass(frozen=True, slots=True)
class U32:
    """An unsigned 32-bit integer; GGUF has eight integer types, so a plain `int` is refused."""

    value: int


@dataclass(frozen=True, slots=True)
class I32s:
    """A list of signed 32-bit integers."""

    values: Sequence[int]


Value = U32 | I32s | float | bool | str | Sequence[str] | Sequence[bool]

# Type numbers of metadata values.
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


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
        return _nbytes(self.kind, self.shape)


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """Type, shape and position of a tensor in a file."""

    kind: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _nbytes(kind: GgmlType, shape: Sequence[int]) -> int:
    _, weights, nbytes = KINDS[kind]
    return math.prod(shape) // weights * nbytes


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Sequence[GgufTensor], advance: Advance
) -> int:
    """Write a file, tensor after tensor; its size in bytes.

    Raises:
        FormatError: blocks that do not add up to their tensor.
    """
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _value(value))
        offset = 0
        for tensor in tensors:
            dims = tensor.shape[::-1]
            file.write(_string(tensor.name))
            file.write(struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
            file.write(struct.pack("<IQ", KINDS[tensor.kind][0], offset))
            offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
        _pad(file)
        for tensor in tensors:
            write_blocks(file, tensor.blocks(), tensor.name, tensor.nbytes, advance)
            _pad(file)
        return file.tell()


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    """A metadata value as bytes: type number, then content."""
    if isinstance(value, U32):
        return struct.pack("<II", _U32, value.value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, I32s):
        head = struct.pack("<IIQ", _ARRAY, _I32, len(value.values))
        return head + struct.pack(f"<{len(value.values)}i", *value.values)
    flags = [item for item in value if isinstance(item, bool)]
    if flags:
        head = struct.pack("<IIQ", _ARRAY, _BOOL, len(flags))
        return head + struct.pack(f"<{len(flags)}?", *flags)
    texts = [item for item in value if isinstance(item, str)]
    head = struct.pack("<IIQ", _ARRAY, _STRING, len(texts))
    return head + b"".join(_string(text) for text in texts)


def read_places(path: Path) -> dict[str, GgufPlace]:
    """Positions of all tensors of a file by name.

    Raises:
        FormatError: not a GGUF file, or one with types that `write_gguf` does not write.
    """
    numbers = {number: kind for kind, (number, _, _) in KINDS.items()}
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise FormatError(f"`{path.name}` is not a GGUF file")
        version, tensors, pairs = _unpack(file, "<IQQ")
        if version != VERSION:
            raise FormatError(f"`{path.name}`: GGUF version {version}, expected {VERSION}")
        for _ in range(pairs):
            _skip(file, _read_string(file))
        found = []
        for _ in range(tensors):
            name = _read_string(file)
            (count,) = _unpack(file, "<I")
            dims = _unpack(file, f"<{count}Q")
            number, offset = _unpack(file, "<IQ")
            if number not in numbers:
                raise FormatError(f"`{path.name}`: `{name}` has unknown type {number}")
            found.append((name, numbers[number], dims[::-1], offset))
        start = file.tell() + -file.tell() % ALIGNMENT
    return {
        name: GgufPlace(kind, shape, start + offset, _nbytes(kind, shape))
        for name, kind, shape, offset in found
    }


def _unpack(file: BinaryIO, layout: str) -> tuple[int, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _read_string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    return file.read(length).decode()


def _skip(file: BinaryIO, key: str) -> None:
    """Move past a metadata value."""
    (kind,) = _unpack(file, "<I")
    count = 1
    if kind == _ARRAY:
        kind, count = _unpack(file, "<IQ")
    sizes = {_U32: 4, _I32: 4, _F32: 4, _BOOL: 1}
    if kind == _STRING:
        for _ in range(count):
            _read_string(file)
    elif kind in sizes:
        file.seek(sizes[kind] * count, 1)
    else:
        raise FormatError(f"`{key}` has a value of unknown type {kind}")


def read_rows(path: Path, place: GgufPlace, start: int, stop: int) -> Tensor:
    """Rows of a matrix: values, or for a quantized one bytes [rows, blocks, bytes of a block].

    The rows of a stack of matrices count through.
    """
    K = place.shape[-1]
    _, weights, nbytes = KINDS[place.kind]
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
