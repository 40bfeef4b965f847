"""The draft head: some rows of a model's head, packed to INT4, that drafts are chosen from.

It lies in a folder of its own, since engines take every safetensors file at the top for the model.
"""

import os
from collections.abc import Iterator, Mapping
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

DRAFT_FOLDER = "draft"
DRAFT_NAME = "head.safetensors"
DRAFT_FILE = f"{DRAFT_FOLDER}/{DRAFT_NAME}"
IDS = "ids"
BITS = 4
VERSION_KEY, VERSION = "lowbit_draft_head", "1"
AGAIN = "convert again, or remove the folder to draft with the whole head"


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Rows of the head that drafts are chosen from."""

    ids: Tensor  # [N] int32, token of every row, ascending
    packed: Tensor  # [N, ceil(h * 4 / 32)] int32, codes
    scale: Tensor  # [N, h / G] bfloat16
    scheme: Scheme  # INT4 in groups of G


def open_draft_head(folder: Path, config: Mapping[str, Any]) -> DraftHead | None:
    """Read the draft head of a packed folder, every part of it checked; None where it has none.

    Raises:
        FormatError: a file that cannot be read or is damaged; a tensor that is missing, extra, of
            another dtype or size than the model's; ids that do not ascend or are no tokens.
        UnsupportedModelError: the architecture is not implemented.
    """
    path = folder / DRAFT_FILE
    if not os.path.lexists(path):
        return None
    try:
        check_regular(path, folder)
        _check_version(path)
        tensors = read_header(path)
        sizes = read_config(config)
        scheme = _check_tensors(tensors, sizes.hidden_size)
        content = Checkpoint(path.parent, config, tensors)
        ids, packed, scale = (content.read(name) for name in (IDS, PACKED, SCALE))
    except CheckpointError as error:
        raise FormatError(f"`{DRAFT_FILE}`: {error}", hint=error.hint or AGAIN) from None
    _check_ids(ids, sizes.vocab_size)
    if not bool(scale.isfinite().all()):
        raise _refused(f"`{SCALE}` holds values that are not finite")
    return DraftHead(ids, packed, scale, scheme)


def draft_head_size(rows: int, hidden: int, scheme: Scheme) -> int:
    """Bytes of the file of a draft head."""
    return _layout(rows, packed_words(hidden, BITS), scheme.groups(DRAFT_FILE, hidden)).size


def draft_head_bytes(head: DraftHead) -> bytes:
    """Content of the file."""
    parts = {IDS: head.ids, PACKED: head.packed, SCALE: head.scale}
    shard = _layout(len(head.ids), head.packed.shape[1], head.scale.shape[1])
    return b"".join([shard.header, *(raw_bytes(parts[info.name]) for info in shard.tensors)])


def _layout(rows: int, words: int, groups: int) -> Shard:
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        (IDS, torch.int32, (rows,)),
        (PACKED, torch.int32, (rows, words)),
        (SCALE, torch.bfloat16, (rows, groups)),
    ]
    limit = rows * (4 + 4 * words + 2 * groups) + 10_000  # header included
    (shard,) = lay_out(tensors, limit, {**METADATA, VERSION_KEY: VERSION})
    return shard


def entries(folder: Path) -> Iterator[Path]:
    """Entries of a packed folder, the files of its draft folder in place of that folder."""
    for path in folder.iterdir():
        if path in draft_folders(folder):
            yield from path.iterdir()
        else:
            yield path


def draft_folders(folder: Path) -> list[Path]:
    """The draft folder of a packed folder, none where it has none."""
    path = folder / DRAFT_FOLDER
    return [path] if path.is_dir() and not path.is_symlink() else []


def name_in(folder: Path, path: Path) -> str:
    """Name of an entry as lowbit.json has it: `draft/head.safetensors`."""
    return path.relative_to(folder).as_posix()


def _refused(what: str) -> FormatError:
    return FormatError(f"`{DRAFT_FILE}`: {what}", hint=AGAIN)


def _check_version(path: Path) -> None:
    found = read_metadata(path).get(VERSION_KEY)
    if found != VERSION:
        raise _refused(f"`{VERSION_KEY}` of its metadata is {found!r}, expected {VERSION!r}")


def _check_tensors(tensors: Mapping[str, TensorInfo], hidden: int) -> Scheme:
    """Compare the headers with one another and with the model; the scheme of the rows."""
    for name in sorted({IDS, PACKED, SCALE} ^ tensors.keys()):
        raise _refused(f"`{name}` is {'not known' if name in tensors else 'missing'}")
    wanted = ((IDS, torch.int32, 1), (PACKED, torch.int32, 2), (SCALE, torch.bfloat16, 2))
    for name, dtype, dimensions in wanted:
        info = tensors[name]
        if info.dtype != dtype or len(info.shape) != dimensions:
            raise _refused(
                f"`{name}` is {info.dtype_name} {list(info.shape)}, expected "
                f"{str(dtype).removeprefix('torch.')} of {dimensions} dimensions"
            )
    rows = tensors[IDS].shape[0]
    expected = (rows, packed_words(hidden, BITS))
    if tensors[PACKED].shape != expected:
        raise _refused(
            f"`{PACKED}` is {list(tensors[PACKED].shape)}, expected {list(expected)} for {rows} "
            f"ids and a hidden size of {hidden}"
        )
    found, groups = tensors[SCALE].shape
    if found != rows or not groups or hidden % groups:
        raise _refused(
            f"`{SCALE}` is {[found, groups]}, expected {rows} rows of groups that divide {hidden}"
        )
    return Scheme(BITS, None if groups == 1 else hidden // groups)


def _check_ids(ids: Tensor, vocabulary: int) -> None:
    if not len(ids):
        raise _refused("it has no rows")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise _refused(f"`{IDS}` holds {low if low < 0 else high}, expected 0 to {vocabulary - 1}")
    later = (ids[1:] <= ids[:-1]).nonzero()
    if len(later):
        place = int(later[0, 0])
        raise _refused(f"`{IDS}` does not ascend: {int(ids[place + 1])} follows {int(ids[place])}")
