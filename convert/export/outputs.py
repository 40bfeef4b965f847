"""Tensors of an export, written one after the other in blocks, so that none is held whole."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from torch import Tensor

from lowbit.convert.export.source import BLOCK_WEIGHTS, Linear, PackedSource
from lowbit.convert.original.progress import Advance
from lowbit.formats.architectures.names import any_expert, expert_of
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.manifest import json_bytes
from lowbit.formats.layout.packing import SCALE
from lowbit.formats.safetensors.checkpoint import INDEX_FILE, Checkpoint
from lowbit.formats.safetensors.shards import index_json, lay_out
from lowbit.formats.safetensors.tensor_info import DTYPE_NAMES, TensorInfo, raw_bytes

Blocks = Callable[[], Iterable[Tensor]]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of the export."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Blocks  # makes the content in order; called once


def copied(source: Checkpoint, info: TensorInfo, name: str | None = None) -> Output:
    """Copy a tensor of the source, under another name where one is given."""
    return Output(name or info.name, info.dtype, info.shape, lambda: row_parts(source, info))


def row_parts(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Tensor]:
    """A dense tensor in blocks of rows."""
    if not info.shape:
        yield checkpoint.read(info.name)
        return
    for start, stop in row_ranges(info):
        yield checkpoint.read_rows(info.name, start, stop)


def row_ranges(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """Blocks of a tensor's rows as (start, stop)."""
    rows = max(1, BLOCK_WEIGHTS * info.dtype.itemsize // max(1, info.row_bytes))
    for start in range(0, info.shape[0], rows):
        yield start, min(start + rows, info.shape[0])


def constant(name: str, value: Tensor) -> Output:
    """Write a small tensor that is already made."""
    return Output(name, value.dtype, tuple(value.shape), lambda: [value])


def every_output(
    source: PackedSource, pack: Callable[[PackedSource, Linear], Iterable[Output]]
) -> list[Output]:
    """All tensors of an export: dense ones copied, each linear as `pack` writes it."""
    made = [copied(source.checkpoint, info) for info in source.dense]
    for linear in source.linears:
        made += pack(source, linear)
    return made


def transposed_scales(
    source: PackedSource, linear: Linear, name: str, dtype: torch.dtype
) -> Output:
    """Write a linear's scales as [groups, N]."""

    def blocks() -> Iterator[Tensor]:
        yield source.checkpoint.read(f"{linear.module}.{SCALE}").T.to(dtype)

    return Output(name, dtype, (linear.groups, linear.N), blocks)


def write_shards(
    outputs: Sequence[Output],
    folder: Path,
    max_shard_bytes: int,
    metadata: Mapping[str, str],
    advance: Advance,
) -> int:
    """Write safetensors files, and an index if there are several; their bytes in all.

    Args:
        outputs: in any order; a shard holds wider dtypes first.

    Raises:
        FormatError: two outputs with one name, or blocks that do not add up to their tensor.
    """
    by_name = {output.name: output for output in outputs}
    if len(by_name) != len(outputs):
        raise FormatError("two tensors of the export have the same name")
    shards = lay_out(
        [(output.name, output.dtype, output.shape) for output in outputs], max_shard_bytes, metadata
    )
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.write(shard.header)
            for info in shard.tensors:
                write_blocks(file, by_name[info.name].blocks(), info.name, info.nbytes, advance)
    if len(shards) > 1:
        (folder / INDEX_FILE).write_bytes(json_bytes(index_json(shards)))
    return sum(shard.size for shard in shards)


def write_blocks(
    file: BinaryIO, blocks: Iterable[Tensor], name: str, nbytes: int, advance: Advance
) -> None:
    """Write one tensor, block after block.

    Raises:
        FormatError: the blocks do not add up to the stated length.
    """
    written = 0
    for block in blocks:
        data = raw_bytes(block)
        file.write(data)
        written += len(data)
        advance(len(data))
    if written != nbytes:
        raise FormatError(f"`{name}`: {written} bytes were made, the header states {nbytes}")


def stacked(items: Iterable[Item], name_of: Callable[[Item], str]) -> list[list[Item]]:
    """Items that share a name in the container, those of a layer's experts by number.

    GGUF and MLX hold the experts of a layer in one tensor: [E, N, K] for E matrices [N, K].
    """
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(name_of(item), []).append(item)
    return list(found.values())


def stack_shape(name: str, count: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the tensor that holds `count` matrices; `name` is that of one of them."""
    return (*shape,) if expert_of(name) is None else (count, *shape)


def chained(blocks: Sequence[Blocks]) -> Blocks:
    """Blocks of several tensors, one tensor after the other."""

    def all_blocks() -> Iterator[Tensor]:
        for one in blocks:
            yield from one()

    return all_blocks


def check_one_dtype(source: PackedSource) -> None:
    """Refuse experts of one layer whose unquantized weights differ in dtype.

    Raises:
        FormatError: naming the first that differs.
    """
    first: dict[str, TensorInfo] = {}
    for info in source.dense:
        if expert_of(info.name) is None:
            continue
        other = first.setdefault(any_expert(info.name), info)
        if other.dtype != info.dtype:
            raise FormatError(
                f"`{info.name}` is {DTYPE_NAMES[info.dtype]}, `{other.name}` "
                f"{DTYPE_NAMES[other.dtype]}: the experts of a layer become one tensor"
            )
