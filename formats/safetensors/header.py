"""The header of a safetensors file: its tensors, checked against the size of the file.

Format: the safetensors specification (8-byte header length, JSON header, data).
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowbit.formats.errors import CheckpointError
from lowbit.formats.files.reading import open_file
from lowbit.formats.files.strict_json import loads
from lowbit.formats.safetensors.tensor_info import DTYPES, TensorInfo

METADATA_KEY = "__metadata__"  # key of a header that is no tensor
MAX_HEADER_BYTES = 64_000_000  # the safetensors library allows 100 MB, which take 2 GB when parsed
MAX_SIZE = 2**63 - 1  # bound of a dimension or an offset
MAX_DIMENSIONS = 64
LFS_POINTER = b"version "  # first 8 bytes of the text that stands for a file in a clone


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the tensors' headers of one safetensors file.

    Raises:
        CheckpointError: the header is malformed, the data is cut short, or `open_file` refuses the
            file.
    """
    return parse_header(*_raw_header(path))


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of one safetensors file; empty where it has none that are text.

    Raises:
        CheckpointError: the header is malformed, or `open_file` refuses the file.
    """
    raw, file, _ = _raw_header(path)
    header = _parse_json(raw, file)
    found = header.get(METADATA_KEY) if isinstance(header, dict) else None
    if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()):
        return found
    return {}


def _raw_header(path: Path) -> tuple[bytes, str, int]:
    """The JSON header of a file, its name, and its size in bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        return file.read(header_length(file.read(8), path.name, size)), path.name, size


def header_length(prefix: bytes, file: str, size: int) -> int:
    """Length of the JSON header, from the first 8 bytes of a file of `size` bytes.

    Raises:
        CheckpointError: the header is longer than the file or than MAX_HEADER_BYTES.
    """
    if prefix == LFS_POINTER:
        raise CheckpointError(
            f"`{file}` is a pointer of Git LFS, which stands for the weights",
            hint="`git lfs pull` in its folder fetches them; or give the model's Hub id",
        )
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"`{file}` is not a safetensors file or is cut short: {size} bytes hold no "
            "complete header"
        )
    return length


def parse_header(raw: bytes, file: str, size: int) -> dict[str, TensorInfo]:
    """Parse a header, and check its tensors against the size of the file.

    Args:
        raw: the JSON header, without its 8-byte length.
        file: name for messages and for the result.

    Raises:
        CheckpointError: not JSON, an unknown dtype, offsets that do not match, or missing data.
    """
    header = _parse_json(raw, file)
    if not isinstance(header, dict):
        raise CheckpointError(f"`{file}`: the header is not a JSON object")
    start = 8 + len(raw)
    tensors = {}
    for name, entry in header.items():
        if name == METADATA_KEY:
            continue
        info = _parse_entry(name, entry, file, start)
        if info.offset + info.nbytes > size:
            raise CheckpointError(
                f"`{file}` is cut short: `{name}` ends at byte {info.offset + info.nbytes}, "
                f"the file has {size}",
                hint="download or copy it again",
            )
        tensors[name] = info
    _check_layout(tensors.values(), file, start, size)
    return tensors


def _parse_json(raw: bytes, file: str) -> Any:
    try:
        return loads(raw)
    except ValueError as error:
        raise CheckpointError(f"`{file}`: the header is not valid JSON: {error}") from None


def _parse_entry(name: str, entry: object, file: str, start: int) -> TensorInfo:
    where = f"`{file}`: `{name}`"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: the header entry is not an object")
    dtype, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: dtype `{dtype}` is not known")
    if not (isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and _are_sizes(shape)):
        raise CheckpointError(f"{where}: shape {shape} is not a list of sizes")
    if not (isinstance(span, list) and len(span) == 2 and _are_sizes(span)):
        raise CheckpointError(f"{where}: data_offsets {span} is not a pair of offsets")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if span[1] - span[0] != nbytes:
        raise CheckpointError(
            f"{where}: {dtype} {shape} needs {nbytes} bytes, data_offsets give {span[1] - span[0]}"
        )
    return TensorInfo(name, DTYPES[dtype], tuple(shape), file, start + span[0], nbytes)


def _are_sizes(values: list[Any]) -> bool:
    return all(type(n) is int and 0 <= n <= MAX_SIZE for n in values)


def _check_layout(tensors: Iterable[TensorInfo], file: str, start: int, size: int) -> None:
    """Refuse overlaps, holes and trailing bytes, which the specification forbids."""
    end = start
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            raise CheckpointError(
                f"`{file}`: `{info.name}` starts at byte {info.offset}, expected {end}"
            )
        end += info.nbytes
    if end != size:
        raise CheckpointError(f"`{file}` has {size - end} bytes that no tensor names")
