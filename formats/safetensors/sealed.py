"""Tensors that a later run takes up, sealed by a hash of them and of all that they follow from.

A damaged file, or one of another run, layer or release, is told by its seal before it is used.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from lowbit.formats.errors import CheckpointError
from lowbit.formats.files.atomic import replace_file_by_parts
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.formats.safetensors.hashing import hash_tensor
from lowbit.formats.safetensors.header import read_header, read_metadata
from lowbit.formats.safetensors.shards import METADATA, lay_out
from lowbit.formats.safetensors.tensor_info import DTYPE_NAMES, raw_bytes

FACTS, SEAL = "facts", "seal"  # keys of the file's metadata
ONE_FILE = 1 << 62  # bytes of a shard that nothing exceeds

Row = tuple[str, str, list[int], str]  # name, dtype, shape and SHA-256 of a tensor


@dataclass(frozen=True, slots=True)
class Sealed:
    """A file whose seal holds."""

    facts: dict[str, Any]  # what it says besides its tensors
    content: Checkpoint  # its tensors, to be read


def write_sealed(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], identity: str
) -> None:
    """Write a sealed safetensors file, whole or not at all.

    Args:
        identity: names all that the tensors follow from, and the file's place among others.

    Raises:
        ResourceError: it cannot be written.
    """
    views = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    rows = [
        (name, DTYPE_NAMES[tensor.dtype], list(tensor.shape), sha256(views[name]).hexdigest())
        for name, tensor in tensors.items()
    ]
    text = json.dumps(facts)
    metadata = {**METADATA, FACTS: text, SEAL: _seal(identity, text, rows)}
    outputs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    (shard,) = lay_out(outputs, ONE_FILE, metadata)
    replace_file_by_parts(path, [shard.header, *(views[info.name] for info in shard.tensors)])


def open_sealed(path: Path, identity: str) -> Sealed | None:
    """A file that `write_sealed` made for this identity; None for any other, and for damage.

    Raises:
        FileNotFoundError: there is no such file.
    """
    try:
        tensors, metadata = read_header(path), read_metadata(path)
        rows = [
            (name, info.dtype_name, list(info.shape), hash_tensor(path, info))
            for name, info in tensors.items()
        ]
    except CheckpointError:
        return None
    text = metadata.get(FACTS, "")
    if metadata.get(SEAL) != _seal(identity, text, rows):
        return None
    return Sealed(json.loads(text), Checkpoint(path.parent, {}, tensors))


def _seal(identity: str, facts: str, rows: Iterable[Row]) -> str:
    return sha256(json.dumps([identity, facts, sorted(rows)]).encode()).hexdigest()
