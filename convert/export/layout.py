"""What an export of safetensors files consists of, as plain functions of the packed folder."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowbit.convert.export.outputs import Output
from lowbit.convert.export.proof import Decoded
from lowbit.convert.export.source import Linear, Source
from lowbit.formats.checkpoint import Checkpoint, TensorInfo
from lowbit.formats.shards import METADATA


def everything(source: Source) -> Sequence[Linear]:
    """All linears."""
    return source.linears


def unchanged(source: Source) -> Sequence[tuple[TensorInfo, str]]:
    """All tensors beside the linears, under their names."""
    return [(info, info.name) for info in source.dense]


def nothing(source: Source) -> Iterable[str]:
    """No remarks."""
    return ()


@dataclass(frozen=True, slots=True)
class Layout:
    """A container.

    Attributes:
        check: raises FormatError for what the container cannot express exactly.
        outputs: every tensor to be written.
        config: content of config.json.
        decode: reads a linear from the written checkpoint, by the container's own arithmetic.
        linears: those that are exported.
        copies: tensors that keep their bytes, with their new names.
        header: metadata of the files.
        dropped: what is left out, and why.
        notes: what to know about readers.
    """

    check: Callable[[Source], None]
    outputs: Callable[[Source], list[Output]]
    config: Callable[[Source], dict[str, Any]]
    decode: Callable[[Source, Checkpoint, Linear], Iterable[Decoded]]
    linears: Callable[[Source], Sequence[Linear]] = everything
    copies: Callable[[Source], Sequence[tuple[TensorInfo, str]]] = unchanged
    header: Mapping[str, str] = field(default_factory=lambda: METADATA)
    dropped: Callable[[Source], Iterable[str]] = nothing
    notes: Callable[[Source], Iterable[str]] = nothing
