"""Parts of an export of safetensors files, as plain functions of the packed folder."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowbit.convert.export.misfits import Misfit
from lowbit.convert.export.outputs import Output
from lowbit.convert.export.proof import Decoded
from lowbit.convert.export.source import Linear, PackedSource
from lowbit.formats.safetensors.checkpoint import Checkpoint, TensorInfo
from lowbit.formats.safetensors.shards import METADATA


def everything(source: PackedSource) -> Sequence[Linear]:
    """All linears."""
    return source.linears


def unchanged(source: PackedSource) -> Sequence[tuple[TensorInfo, str]]:
    """All tensors beside the linears, under their names."""
    return [(info, info.name) for info in source.dense]


def all_fit(source: PackedSource) -> Sequence[Misfit]:
    """No linear is without a place."""
    return ()


def any_order(source: PackedSource) -> None:
    """Nothing else can be in the way."""


def nothing(source: PackedSource) -> Iterable[str]:
    """No remarks."""
    return ()


@dataclass(frozen=True, slots=True)
class Layout:
    """A container.

    Attributes:
        name: of the container, for messages.
        outputs: every tensor to be written.
        config: content of config.json.
        decode: reads a linear from the written checkpoint, by the container's own arithmetic.
        misfits: linears that the container cannot hold as they are.
        check: raises FormatError for anything else that the container cannot express exactly.
        linears: those that are exported.
        copies: tensors that keep their bytes, with their new names.
        header: metadata of the files.
        dropped: what is left out, and why.
        notes: what to know about readers.
    """

    name: str
    outputs: Callable[[PackedSource], list[Output]]
    config: Callable[[PackedSource], dict[str, Any]]
    decode: Callable[[PackedSource, Checkpoint, Linear], Iterable[Decoded]]
    misfits: Callable[[PackedSource], Sequence[Misfit]] = all_fit
    check: Callable[[PackedSource], None] = any_order
    linears: Callable[[PackedSource], Sequence[Linear]] = everything
    copies: Callable[[PackedSource], Sequence[tuple[TensorInfo, str]]] = unchanged
    header: Mapping[str, str] = field(default_factory=lambda: METADATA)
    dropped: Callable[[PackedSource], Iterable[str]] = nothing
    notes: Callable[[PackedSource], Iterable[str]] = nothing
