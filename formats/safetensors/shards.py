"""Layout of tensors in safetensors shards, computed before any tensor exists.

The plan states every output's dtype and shape, so a shard's header is written first and rows go
straight to their place; no tensor is held whole in memory.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowbit.formats.errors import FormatError
from lowbit.formats.safetensors.checkpoint import DTYPE_NAMES, SINGLE_FILE, TensorInfo
from lowbit.formats.safetensors.header import METADATA_KEY

ALIGNMENT = 64  # of the data in the file, so that readers can map it
METADATA = {"format": "pt"}  # required by transformers and vLLM


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to write: its header and the position of each tensor."""

    file: str
    header: bytes  # 8-byte length included
    tensors: tuple[TensorInfo, ...]
    size: int  # of the whole file


def lay_out(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    max_shard_bytes: int,
    metadata: Mapping[str, str] = METADATA,
) -> list[Shard]:
    """Split tensors over shards, in order, each at most `max_shard_bytes` long.

    A tensor above the limit gets a shard of its own. Every header holds the metadata.

    Raises:
        FormatError: a name that the format reserves, or too many shards.
    """
    if any(name == METADATA_KEY for name, _, _ in tensors):
        raise FormatError(f"a tensor cannot be called `{METADATA_KEY}` in a safetensors file")
    groups: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    used = 0
    for tensor in tensors:
        # Data and header entry; dtype and offsets of an entry take at most 100 bytes.
        nbytes = _nbytes(tensor) + len(json.dumps([tensor[0], tensor[2]])) + 100
        if groups[-1] and used + nbytes > max_shard_bytes - 200:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += nbytes
    count = len(groups)
    if count > 99999:
        raise FormatError(f"{count} shards do not fit the five digits of their names")
    names = (
        [SINGLE_FILE]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    return [_shard(name, group, metadata) for name, group in zip(names, groups, strict=True)]


def _shard(
    file: str,
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str],
) -> Shard:
    # Wider dtypes first: every tensor is aligned to its element size, as the format demands.
    ordered = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)
    header: dict[str, Any] = {METADATA_KEY: dict(metadata)}
    offset, spans = 0, []
    for tensor in ordered:
        name, dtype, shape = tensor
        end = offset + _nbytes(tensor)
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        spans.append(offset)
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
    start = 8 + len(raw)
    infos = tuple(
        TensorInfo(name, dtype, shape, file, start + span, _nbytes((name, dtype, shape)))
        for (name, dtype, shape), span in zip(ordered, spans, strict=True)
    )
    return Shard(file, len(raw).to_bytes(8, "little") + raw, infos, start + offset)


def index_json(shards: Sequence[Shard]) -> dict[str, Any]:
    """Content of model.safetensors.index.json."""
    weight_map = {info.name: shard.file for shard in shards for info in shard.tensors}
    total = sum(info.nbytes for shard in shards for info in shard.tensors)
    return {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }


def _nbytes(tensor: tuple[str, torch.dtype, tuple[int, ...]]) -> int:
    return math.prod(tensor[2]) * tensor[1].itemsize
