"""Fused sets of a model, each of which gets one scheme: sizes, and patterns of their names."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

from lowbit.formats.architectures import is_tied, tensor_table
from lowbit.formats.architectures.names import any_expert, split_layer
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import CheckpointError, QuantizationError
from lowbit.formats.layout.packing import packed_shapes
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.packed import OUTPUT_DTYPES
from lowbit.formats.safetensors.checkpoint import TensorInfo

BITS = (2, 3, 4, 8)  # that may be chosen from
USUAL_BITS = (4, 8)  # unless others are asked for
RANKED_BITS = 4  # by which sets are ranked and drawn
GROUPS = (32, 64, 128)

Choice = tuple["FusedSet", Scheme]


@dataclass(frozen=True, slots=True)
class FusedSet:
    """Linears that engines stack into one matrix, or one that stands alone."""

    name: str  # of the fused set; of the module where it stands alone
    modules: tuple[str, ...]  # its linears
    shapes: tuple[tuple[int, int], ...]  # of their weights, [N, K] each; K is the same for all
    stored_bytes: int  # bytes of their weights in the source; of the embedding for a tied head
    shared: bool  # True where they stay in the file even when quantized, as a tied head's do

    @property
    def weights(self) -> int:
        """Number of weights in the set."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def layer(self) -> int | None:
        """Number of its decoder layer; None for the head."""
        return split_layer(self.name).layer

    @property
    def kind(self) -> str:
        """Name inside its layer: `self_attn.qkv`."""
        return split_layer(self.name).rest

    def packed_bytes(self, scheme: Scheme | None) -> int:
        """Bytes of its tensors under a scheme, None for as stored.

        Raises:
            QuantizationError: the group size does not divide K.
        """
        if scheme is None:
            return self.stored_bytes
        return sum(
            OUTPUT_DTYPES[suffix].itemsize * math.prod(shape)
            for module, (N, K) in zip(self.modules, self.shapes, strict=True)
            for suffix, shape in packed_shapes(N, K, scheme, module).items()
        )

    def file_bytes(self, scheme: Scheme | None) -> int:
        """Bytes that the set adds to a file; a tied head adds none unless it is quantized."""
        return 0 if self.shared and scheme is None else self.packed_bytes(scheme)


def fused_sets(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> list[FusedSet]:
    """Fused sets of decoder and head in the order of the forward pass.

    Linears of multi-token prediction, which only draft, are left out.

    Raises:
        UnsupportedModelError: the architecture is not implemented.
        CheckpointError: a weight is missing.
    """
    table = tensor_table(config, tensors)
    embedding = next(spec.name for spec in table if spec.role == "embedding")
    members: dict[str, list[TensorSpec]] = {}
    for spec in table:
        if spec.quantizable and spec.role != "mtp":
            members.setdefault(spec.fused_set or spec.module, []).append(spec)
    sets = []
    for name, specs in members.items():
        shared = specs[0].role == "head" and is_tied(config)
        names = [embedding if shared else spec.name for spec in specs]
        missing = [weight for weight in names if weight not in tensors]
        if missing:
            raise CheckpointError(f"the checkpoint lacks `{missing[0]}`")
        sets.append(
            FusedSet(
                name=name,
                modules=tuple(spec.module for spec in specs),
                shapes=tuple((spec.shape[0], spec.shape[1]) for spec in specs),
                stored_bytes=sum(tensors[weight].nbytes for weight in names),
                shared=shared,
            )
        )
    return sets


def choices_of(
    sets: Sequence[FusedSet], groups: Sequence[int], bits: Sequence[int]
) -> list[Choice]:
    """Every set with every scheme to choose from: all bits, every group size that divides its K.

    Raises:
        QuantizationError: no group size divides the K of a set.
    """
    choices: list[Choice] = []
    for fused in sets:
        K = fused.shapes[0][1]
        fitting = [group for group in groups if K % group == 0]
        if not fitting:
            sizes = ", ".join(map(str, groups))
            raise QuantizationError(
                f"`{fused.name}`: none of the group sizes {sizes} divides K = {K}"
            )
        choices += [(fused, Scheme(width, group)) for width in bits for group in fitting]
    return choices


def patterns_for(
    sets: Sequence[FusedSet], wanted: Mapping[str, Scheme | None]
) -> list[tuple[str, Scheme | None]]:
    """Patterns that give every set its scheme, the last match of a linear's name being its own.

    A pattern for every kind of set with its most common scheme, then one for every exception.

    Args:
        wanted: scheme of every set by name, with a group size; None for as stored.
    """
    linears = [module for fused in sets for module in fused.modules]
    kinds: dict[str, list[FusedSet]] = {}
    for fused in sets:
        kinds.setdefault(fused.kind, []).append(fused)
    common: dict[str, Scheme | None] = {}
    patterns: list[tuple[str, Scheme | None]] = []
    for kind, members in kinds.items():
        modules = [module for fused in members for module in fused.modules]
        pattern = _kind_pattern(members)
        if _matched(pattern, linears) == modules:
            common[kind] = Counter(wanted[fused.name] for fused in members).most_common(1)[0][0]
            patterns.append((pattern, common[kind]))
    for fused in sets:
        scheme = wanted[fused.name]
        if fused.kind not in common or common[fused.kind] != scheme:
            names = without_experts(fused.modules)
            if _matched(joined(names), linears) == list(fused.modules):
                names = [joined(names)]
            patterns += [(name, scheme) for name in names]
    return patterns


def _kind_pattern(members: Sequence[FusedSet]) -> str:
    """Pattern of the linears of sets that differ by layer alone: `*.self_attn.[qkv]_proj`."""
    first = without_experts(members[0].modules)
    return joined(first if len(members) == 1 else [f"*.{split_layer(name).rest}" for name in first])


def _matched(pattern: str, names: Collection[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def without_experts(modules: Sequence[str]) -> list[str]:
    """Patterns of a set's linears: one for the same linear of all experts, whose sets are whole."""
    return list(dict.fromkeys(map(any_expert, modules)))


def joined(names: Sequence[str]) -> str:
    """One pattern for names that differ in one place; it may match others too.

    `mlp.gate_proj` and `mlp.up_proj` give `mlp.[gu]*_proj`.
    """
    start = _shared(names)
    end = _shared([name[start:][::-1] for name in names])
    middles = [name[start : len(name) - end] for name in names]
    if len(names) == 1 or not all(middles):
        return names[0]
    letters = "".join(dict.fromkeys(middle[0] for middle in middles))
    rest = "" if all(len(middle) == 1 for middle in middles) else "*"
    return f"{names[0][:start]}[{letters}]{rest}{names[0][len(names[0]) - end :]}"


def _shared(names: Sequence[str]) -> int:
    """Number of characters that all names begin with."""
    columns = zip(*names, strict=False)  # as long as the shortest
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
