"""The functions that define a safetensors container, gathered in one record."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lowbit.convert.export.misfits import Misfit
from lowbit.convert.export.outputs import Output, row_parts, row_ranges
from lowbit.convert.export.proof import Decoded
from lowbit.convert.export.source import Linear, PackedSource
from lowbit.formats.safetensors.checkpoint import Checkpoint, TensorInfo
from lowbit.formats.safetensors.shards import METADATA


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a tensor in an export."""

    name: str  # of the tensor, or of the module where a suffix is added
    # Number of the matrix within a stack of experts; None for a tensor of its own.
    expert: int | None = None

    def rows(self, made: Checkpoint, start: int, stop: int, suffix: str = "") -> Tensor:
        """Read rows [start, stop) of the matrix; of an expert, all are read and cut."""
        if self.expert is None:
            return made.read_rows(f"{self.name}{suffix}", start, stop)
        stack = made.read_rows(f"{self.name}{suffix}", self.expert, self.expert + 1)
        return stack[0, start:stop]

    def parts(self, made: Checkpoint) -> Iterator[Tensor]:
        """Read the tensor in the blocks in which `row_parts` reads one of the source."""
        info = made.tensors[self.name]
        if self.expert is None:
            yield from row_parts(made, info)
            return
        one = replace(info, shape=info.shape[1:])
        for start, stop in row_ranges(one):
            yield self.rows(made, start, stop)


def unchanged(source: PackedSource) -> Sequence[tuple[TensorInfo, Place]]:
    """Copy all dense tensors under their own names."""
    return [(info, Place(info.name)) for info in source.dense]


@dataclass(frozen=True, slots=True)
class Layout:
    """A container."""

    name: str  # of the container, for messages
    outputs: Callable[[PackedSource], list[Output]]  # lists the tensors to write
    config: Callable[[PackedSource], dict[str, Any]]  # makes the content of config.json
    # Reads a linear from the written checkpoint, by the container's own arithmetic.
    decode: Callable[[PackedSource, Checkpoint, Linear], Iterable[Decoded]]
    # Finds the linears that the container cannot hold as they are.
    misfits: Callable[[PackedSource], Sequence[Misfit]] = lambda source: ()
    # Raises FormatError for anything else that the container cannot express exactly.
    check: Callable[[PackedSource], None] = lambda source: None
    # Lists the linears that are exported.
    linears: Callable[[PackedSource], Sequence[Linear]] = lambda source: source.linears
    # Lists the tensors that keep their bytes, with their new places.
    copies: Callable[[PackedSource], Sequence[tuple[TensorInfo, Place]]] = unchanged
    # Metadata of the safetensors files.
    header: Mapping[str, str] = field(default_factory=lambda: METADATA)
    # Names the parts that are left out, with reasons.
    dropped: Callable[[PackedSource], Iterable[str]] = lambda source: ()
    # Sentences on which readers take the export.
    notes: Callable[[PackedSource], Iterable[str]] = lambda source: ()
