"""Some rows of a model's head in a file of their own: their layout, and what a reader refuses."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.architectures import read_config
from lowbit.formats.errors import CheckpointError, FormatError
from lowbit.formats.files.reading import check_regular
from lowbit.formats.layout.packing import PACKED, SCALE, packed_words
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import Checkpoint, TensorInfo
from lowbit.formats.safetensors.header import read_header, read_metadata
from lowbit.formats.safetensors.shards import METADATA, Shard, lay_out
from lowbit.formats.safetensors.tensor_info import raw_bytes

IDS = "ids"


@dataclass(frozen=True, slots=True)
class RowsFile:
    """A kind of file that holds rows of a head."""

    name: str  # inside the packed folder, a folder of its own in front
    bits: int  # of the rows
    version_key: str  # in the file's metadata
    version: str
    hint: str  # for files that are refused


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a head, packed by themselves."""

    ids: Tensor  # [N] int32, token of every row, ascending
    packed: Tensor  # [N, ceil(h * bits / 32)] int32, codes
    scale: Tensor  # [N, h / G] bfloat16
    scheme: Scheme


def open_head_rows(file: RowsFile, folder: Path, config: Mapping[str, Any]) -> PackedRows | None:
    """Read the rows of a packed folder, every part of them checked; None where it has none.

    Raises:
        FormatError: a file that cannot be read or is damaged; a tensor that is missing, extra, of
            another dtype or size than the model's; ids that do not ascend or are no tokens.
        UnsupportedModelError: the architecture is not implemented.
    """
    path = folder / file.name
    if not os.path.lexists(path):
        return None
    try:
        check_regular(path, folder)
        _check_version(file, path)
        tensors = read_header(path)
        sizes = read_config(config)
        scheme = _check_tensors(file, tensors, sizes.hidden_size)
        content = Checkpoint(path.parent, config, tensors)
        ids, packed, scale = (content.read(name) for name in (IDS, PACKED, SCALE))
    except CheckpointError as error:
        raise FormatError(f"`{file.name}`: {error}", hint=error.hint or file.hint) from None
    _check_ids(file, ids, sizes.vocab_size)
    if not bool(scale.isfinite().all()):
        raise _refused(file, f"`{SCALE}` holds values that are not finite")
    return PackedRows(ids, packed, scale, scheme)


def head_rows_size(file: RowsFile, rows: int, hidden: int, scheme: Scheme) -> int:
    """Bytes of the file."""
    groups = scheme.groups(file.name, hidden)
    return _layout(file, rows, packed_words(hidden, file.bits), groups).size


def head_rows_bytes(file: RowsFile, rows: PackedRows) -> bytes:
    """Content of the file."""
    parts = {IDS: rows.ids, PACKED: rows.packed, SCALE: rows.scale}
    shard = _layout(file, len(rows.ids), rows.packed.shape[1], rows.scale.shape[1])
    return b"".join([shard.header, *(raw_bytes(parts[info.name]) for info in shard.tensors)])


def _layout(file: RowsFile, rows: int, words: int, groups: int) -> Shard:
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        (IDS, torch.int32, (rows,)),
        (PACKED, torch.int32, (rows, words)),
        (SCALE, torch.bfloat16, (rows, groups)),
    ]
    limit = rows * (4 + 4 * words + 2 * groups) + 10_000  # header included
    (shard,) = lay_out(tensors, limit, {**METADATA, file.version_key: file.version})
    return shard


def _refused(file: RowsFile, what: str) -> FormatError:
    return FormatError(f"`{file.name}`: {what}", hint=file.hint)


def _check_version(file: RowsFile, path: Path) -> None:
    key, version = file.version_key, file.version
    found = read_metadata(path).get(key)
    if found != version:
        raise _refused(file, f"`{key}` of its metadata is {found!r}, expected {version!r}")


def _check_tensors(file: RowsFile, tensors: Mapping[str, TensorInfo], hidden: int) -> Scheme:
    """Compare the headers with one another and with the model; the scheme of the rows."""
    for name in sorted({IDS, PACKED, SCALE} ^ tensors.keys()):
        raise _refused(file, f"`{name}` is {'not known' if name in tensors else 'missing'}")
    wanted = ((IDS, torch.int32, 1), (PACKED, torch.int32, 2), (SCALE, torch.bfloat16, 2))
    for name, dtype, dimensions in wanted:
        info = tensors[name]
        if info.dtype != dtype or len(info.shape) != dimensions:
            raise _refused(
                file,
                f"`{name}` is {info.dtype_name} {list(info.shape)}, expected "
                f"{str(dtype).removeprefix('torch.')} of {dimensions} dimensions",
            )
    rows = tensors[IDS].shape[0]
    expected = (rows, packed_words(hidden, file.bits))
    if tensors[PACKED].shape != expected:
        raise _refused(
            file,
            f"`{PACKED}` is {list(tensors[PACKED].shape)}, expected {list(expected)} for {rows} "
            f"ids and a hidden size of {hidden}",
        )
    found, groups = tensors[SCALE].shape
    if found != rows or not groups or hidden % groups:
        raise _refused(
            file,
            f"`{SCALE}` is {[found, groups]}, expected {rows} rows of groups that divide {hidden}",
        )
    return Scheme(file.bits, None if groups == 1 else hidden // groups)


def _check_ids(file: RowsFile, ids: Tensor, vocabulary: int) -> None:
    if not len(ids):
        raise _refused(file, "it has no rows")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        outside = low if low < 0 else high
        raise _refused(file, f"`{IDS}` holds {outside}, expected 0 to {vocabulary - 1}")
    later = (ids[1:] <= ids[:-1]).nonzero()
    if len(later):
        place = int(later[0, 0])
        raise _refused(
            file, f"`{IDS}` does not ascend: {int(ids[place + 1])} follows {int(ids[place])}"
        )
