"""Reading a folder of safetensors: headers without data, rows without the whole tensor.

Files are read with `pread` and never mapped: mapped pages count as resident memory, and bounded
memory is a promise of the converter.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.architectures import Config, is_tied, prefix_of, read_config
from lowbit.formats.errors import CheckpointError
from lowbit.formats.files.reading import MAX_TEXT_BYTES, read_bytes, reopen
from lowbit.formats.files.strict_json import object_of
from lowbit.formats.safetensors.fused import split_experts
from lowbit.formats.safetensors.header import read_header
from lowbit.formats.safetensors.normalize import normalize
from lowbit.formats.safetensors.other_engines import (
    refuse_adapter,
    refuse_gguf_folder,
    refuse_mlx,
)
from lowbit.formats.safetensors.tensor_info import DTYPE_NAMES as DTYPE_NAMES
from lowbit.formats.safetensors.tensor_info import DTYPES as DTYPES
from lowbit.formats.safetensors.tensor_info import TensorInfo as TensorInfo

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 5_000_000  # bound of config.json, which may list 50,000 dense modules
PARTIAL = ".partial"  # ending of the folder that an unfinished conversion works in
COMPARED_BYTES = 64 << 20  # of a tensor at a time
MOST_AT_ONCE = 1 << 30  # bytes of a read; macOS refuses those of 2 GB and more


DerivedRows = Callable[[int, int, torch.device], Tensor]  # start, stop, device


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Headers of a folder, read and checked; holds no data and no open file."""

    folder: Path  # folder of the files
    config: Mapping[str, Any]  # content of config.json
    tensors: Mapping[str, TensorInfo]  # headers by name
    # functions that make rows of tensors stored in another tool's layout
    derived: Mapping[str, DerivedRows] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # sentences on what is read in another way than the folder says

    @property
    def sizes(self) -> Config:
        """The architecture's sizes; see `read_config` for what it refuses."""
        return read_config(self.config)

    @property
    def prefix(self) -> str:
        """Beginning of the decoder's tensor names, `model.`."""
        return prefix_of(self.config, self.tensors)

    @property
    def tied(self) -> bool:
        """Tell if the head is the embedding."""
        return is_tied(self.config)

    def read(self, name: str) -> Tensor:
        """Read a whole tensor to the CPU."""
        info = self.tensors[name]
        if name in self.derived:
            return self.derived[name](0, info.shape[0], torch.device("cpu"))
        out = torch.empty(info.shape, dtype=info.dtype)
        self._fill(info, info.offset, out)
        return out

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) of a tensor with at least one dimension."""
        info = self.tensors[name]
        if name in self.derived:
            return self.derived[name](start, stop, torch.device("cpu"))
        out = torch.empty((stop - start, *info.shape[1:]), dtype=info.dtype)
        self._fill(info, info.offset + start * info.row_bytes, out)
        return out

    def read_some(self, name: str, numbers: Sequence[int]) -> Tensor:
        """Read some rows of a tensor, each by itself: [len(numbers), ...]."""
        info = self.tensors[name]
        if name in self.derived:
            return self.read(name)[list(numbers)]
        out = torch.empty((len(numbers), *info.shape[1:]), dtype=info.dtype)
        if out.numel():
            starts = (info.offset + number * info.row_bytes for number in numbers)
            _read_pieces(self.folder / info.file, list(starts), out)
        return out

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor into a contiguous CPU tensor of its dtype and size, without another copy.

        Raises:
            CheckpointError: `out` does not match, or the file is cut short.
        """
        info = self.tensors[name]
        if out.dtype != info.dtype or out.nbytes != info.nbytes or not out.is_contiguous():
            raise CheckpointError(
                f"`{name}`: {info.dtype_name} {list(info.shape)} does not fit a buffer of "
                f"{out.dtype} {list(out.shape)}"
            )
        if name in self.derived:
            out.copy_(self.read(name))
        else:
            self._fill(info, info.offset, out)

    def rows(self, name: str, rows: int) -> Iterator[tuple[int, Tensor]]:
        """Read a tensor in blocks of at most `rows` rows: (number of the first row, block)."""
        total = self.tensors[name].shape[0]
        for start in range(0, total, rows):
            yield start, self.read_rows(name, start, min(start + rows, total))

    def _fill(self, info: TensorInfo, offset: int, out: Tensor) -> None:
        if out.numel():
            read_at(self.folder / info.file, offset, out)


def read_at(path: Path, offset: int, out: Tensor) -> None:
    """Fill a contiguous CPU tensor with the bytes of a file from `offset` on.

    Args:
        path: file whose header has been read.

    Raises:
        CheckpointError: the file ends first, or `reopen` refuses it.
    """
    _read_pieces(path, [offset], out)


def _read_pieces(path: Path, starts: Sequence[int], out: Tensor) -> None:
    """`read_at` of pieces of one size, which follow each other in `out`."""
    view = out.view(-1).view(torch.uint8).numpy()
    size = len(view) // len(starts)
    with reopen(path) as file:
        for start, row in zip(starts, view.reshape(len(starts), size), strict=True):
            piece, done = row.data, 0
            while done < size:
                part = piece[done : done + MOST_AT_ONCE]
                count = os.preadv(file.fileno(), [part], start + done)
                if count == 0:
                    raise CheckpointError(
                        f"`{path.name}` ends at byte {start + done}, expected {start + size}",
                        hint="the file is cut short; download or copy it again",
                    )
                done += count


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read config and headers of a checkpoint folder: one file, or shards with or without index.

    Raises:
        CheckpointError: no folder, no config.json, no safetensors, a shard that is missing, cut
            short or malformed, or weights that another engine runs.
    """
    config = _read_config(folder)
    refuse_mlx(folder, config)
    stored, notes = _read_headers(folder)
    found = normalize(config, stored, partial(same_values, folder))
    return Checkpoint(folder, found.config, found.tensors, notes=(*notes, *found.notes))


def open_any_layout(folder: Path) -> Checkpoint:
    """`open_checkpoint` of safetensors that another engine may run, such as those of an export.

    Raises:
        CheckpointError: as there.
    """
    return Checkpoint(folder=folder, config=_read_config(folder), tensors=read_headers(folder))


def _read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder that may hold safetensors."""
    if not folder.exists():
        raise CheckpointError(f"`{folder}` does not exist")
    if not folder.is_dir():
        raise CheckpointError(f"`{folder}` is not a folder", hint="give the folder of the model")
    refuse_gguf_folder(folder)
    refuse_adapter(folder)
    return read_json(folder / CONFIG_FILE)


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Read the headers of all tensors of a folder by name, in file order.

    Raises:
        CheckpointError: see `open_checkpoint`.
    """
    return _read_headers(folder)[0]


def _read_headers(folder: Path) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Headers by name, and sentences on files that are not read."""
    index = weight_map(folder)
    present = sorted(path.name for path in folder.glob("*.safetensors") if not path.is_dir())
    notes: tuple[str, ...] = ()
    files = present if index is None else sorted(set(index.values()))
    missing = [file for file in files if file not in present]
    if index is not None and SINGLE_FILE in present and SINGLE_FILE not in files:
        if missing:
            text = f"`{SINGLE_FILE}` is read: `{missing[0]}`, which the index names, is missing"
            index, files, missing, notes = None, [SINGLE_FILE], [], (text,)
        else:
            _require_same_model(folder, files)
            notes = (f"`{SINGLE_FILE}` holds the same bytes as the shards of the index",)
    if not files:
        raise CheckpointError(
            f"`{folder}` is not a checkpoint: it holds no .safetensors file",
            hint="only safetensors checkpoints are read; convert .bin files first",
        )
    for file in missing:
        raise CheckpointError(
            f"the index names shard `{file}`, which is missing from `{folder}`",
            hint="download the missing shard",
        )
    return join_headers((read_header(folder / file) for file in files), index), notes


def _require_same_model(folder: Path, shards: Sequence[str]) -> None:
    """Refuse a single file beside shards of another model: engines do not agree which to read.

    Raises:
        CheckpointError: naming both and the first tensor that differs.
    """
    paths = [folder / file for file in (SINGLE_FILE, *shards)]
    files = [path.stat() for path in paths if path.exists()]  # `read_header` refuses the others
    states = tuple((file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns) for file in files)
    name = _different_tensor(folder, tuple(shards), states)
    if name is not None:
        raise CheckpointError(
            f"`{folder}` holds two models: `{SINGLE_FILE}`, and the shards of its index from "
            f"`{shards[0]}` on; `{name}` differs",
            hint=f"remove the older one: `{SINGLE_FILE}`, which transformers reads, or the "
            "index with its shards",
        )


@cache  # commands open a folder several times: the bytes of files in one state are read once
def _different_tensor(
    folder: Path, shards: tuple[str, ...], states: tuple[tuple[int, ...], ...]
) -> str | None:
    """First tensor that a single file and shards do not share, by headers before bytes."""
    single = read_header(folder / SINGLE_FILE)
    others = {name: info for file in shards for name, info in read_header(folder / file).items()}
    names = sorted(single.keys() | others.keys(), key=lambda name: (name in single, name))
    for name in names:
        one, other = single.get(name), others.get(name)
        if one is None or other is None or not _same_form(one, other):
            return name
    return next((n for n in names if not same_values(folder, single[n], others[n])), None)


def _same_form(one: TensorInfo, other: TensorInfo) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def same_values(folder: Path, one: TensorInfo, other: TensorInfo) -> bool:
    """Tell if two tensors of a folder have the same shape, dtype and bytes.

    Raises:
        CheckpointError: a file is cut short.
    """
    if not _same_form(one, other):
        return False
    for start in range(0, one.nbytes, COMPARED_BYTES):
        size = min(COMPARED_BYTES, one.nbytes - start)
        parts = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        for info, part in zip((one, other), parts, strict=True):
            read_at(folder / info.file, info.offset + start, part)
        if not torch.equal(*parts):
            return False
    return True


def join_headers(
    headers: Iterable[Mapping[str, TensorInfo]], index: Mapping[str, str] | None
) -> dict[str, TensorInfo]:
    """Join the tensors of all shards by name, and check them against the index.

    Returns:
        Headers by name; fused experts appear one by one.

    Raises:
        CheckpointError: a tensor is in two shards, index and shards disagree, or a layer holds
            experts fused and one by one.
    """
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.items():
            if name in tensors:
                raise CheckpointError(
                    f"`{name}` is in both `{tensors[name].file}` and `{info.file}`"
                )
            tensors[name] = info
    if index is not None:
        _check_index(index, tensors)
    return split_experts(tensors)


def weight_map(folder: Path) -> dict[str, str] | None:
    """Read the index's map from tensor to shard; None where the folder has no index.

    Raises:
        CheckpointError: several indexes, or one that does not map names to file names.
    """
    path = folder / INDEX_FILE
    if not path.exists():
        others = sorted(folder.glob("*.safetensors.index.json"))
        if not others:
            return None
        if len(others) > 1:
            names = ", ".join(f"`{other.name}`" for other in others)
            raise CheckpointError(f"`{folder}` holds several indexes: {names}")
        path = others[0]
    shards = read_json(path, MAX_TEXT_BYTES).get("weight_map")
    if not isinstance(shards, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in shards.values()
    ):
        raise CheckpointError(f"`{path}`: `weight_map` must map tensor names to file names")
    return shards


def _check_index(index: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    for name, file in index.items():
        if name not in tensors:
            raise CheckpointError(f"the index places `{name}` in `{file}`, which lacks it")
        if tensors[name].file != file:
            raise CheckpointError(
                f"the index places `{name}` in `{file}`, it is in `{tensors[name].file}`"
            )
    extra = sorted(tensors.keys() - index.keys())
    if extra:
        raise CheckpointError(
            f"`{extra[0]}` is in `{tensors[extra[0]].file}` but not in the index"
            + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else "")
        )


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file of a model folder.

    Raises:
        CheckpointError: the file is missing, cannot be read, or does not hold a JSON object.
    """
    try:
        raw = read_bytes(path, max_bytes)
    except FileNotFoundError:
        raise CheckpointError(
            f"`{path.parent}` is not a checkpoint: it has no {path.name}",
            hint=_place_of_model(path.parent) if path.name == CONFIG_FILE else None,
        ) from None
    return object_of(raw, path)


def _place_of_model(folder: Path) -> str:
    """Advice to somebody who names a folder without config.json."""
    if folder.name.endswith(PARTIAL):
        return "a conversion has not finished here; the command that began it continues"
    inner = [*folder.glob(f"*/{CONFIG_FILE}"), *folder.glob(f"snapshots/*/{CONFIG_FILE}")]
    if inner:
        return f"did you mean `{min(inner).parent}`?"
    return f"give the folder that holds {CONFIG_FILE} and the .safetensors files"
