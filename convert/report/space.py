"""Bytes by part of the model and precision, before and after packing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowbit.formats.architectures.table import Role
from lowbit.formats.draft_head import DRAFT_FILE
from lowbit.formats.frequent_rows import FREQUENT_FILE
from lowbit.formats.packed import PackedCheckpoint
from lowbit.formats.safetensors.checkpoint import DTYPES

PARTS: dict[Role, str] = {
    "embedding": "embedding",
    "norm": "norms",
    "bias": "biases",
    "attention": "attention",
    "mlp": "MLP",
    "expert": "experts",
    "router": "routers",
    "head": "head",
    "delta_in": "DeltaNet",
    "delta_out": "DeltaNet",
    "delta_gate": "DeltaNet",
    "delta_state": "DeltaNet",
    "mtp": "multi-token prediction",
    "drafter": "drafter's head",
}
CARRIED = "vision tower"
HEAD_ROWS = {
    DRAFT_FILE: ("draft head", "INT4"),
    FREQUENT_FILE: ("frequent rows of the head", "INT8"),
}
FILES = "config, tokenizer, other files"
SMALL = 0.005  # share of the folder below which parts are joined in one row


@dataclass(frozen=True, slots=True)
class SizeShare:
    """Bytes of one part of the model in one precision."""

    part: str  # part of the model, in words
    precision: str  # `INT4 g128`, or the dtype; empty for files
    before: int | None  # bytes in the source; None where not known, or where there was no such part
    after: int  # bytes in the folder, scales and shapes included
    share: float = 0.0  # of the folder's bytes


def where_bytes_went(packed: PackedCheckpoint, folder_bytes: int) -> list[SizeShare]:
    """Bytes of the folder by part and precision, largest first; they add up to its size.

    Args:
        folder_bytes: all its files, reports aside.
    """
    before = _source_bytes(packed)
    found = [
        SizeShare(
            part=PARTS[spec.role],
            precision=str(packed.schemes.get(spec.module) or infos[0].dtype_name),
            before=before.get(spec.name),
            after=sum(info.nbytes for info in infos),
        )
        for spec, infos in ((spec, packed.tensors_of(spec)) for spec in packed.specs)
    ]
    found += [
        SizeShare(CARRIED, info.dtype_name, before.get(info.name), info.nbytes)
        for info in packed.carried
    ]
    found += [
        SizeShare(*HEAD_ROWS[file.name], None, file.size_bytes)
        for file in (() if packed.manifest is None else packed.manifest.files)
        if file.name in HEAD_ROWS
    ]
    rest = folder_bytes - sum(row.after for row in found)
    if rest > 0:
        found.append(SizeShare(FILES, "", None, rest))
    groups: dict[tuple[str, str], list[SizeShare]] = {}
    for row in found:
        groups.setdefault((row.part, row.precision), []).append(row)
    rows = sorted(map(_sum, groups.values()), key=lambda row: -row.after)
    rows = [replace(row, share=row.after / max(1, folder_bytes)) for row in rows]
    small = [row for row in rows if row.share < SMALL]
    return rows if len(small) < 2 else [*rows[: -len(small)], _sum(small)]


def _sum(rows: Sequence[SizeShare]) -> SizeShare:
    """One share for several, with all their names."""
    known = [row.before for row in rows if row.before is not None]
    return SizeShare(
        part=", ".join(dict.fromkeys(row.part for row in rows)),
        precision=", ".join(dict.fromkeys(row.precision for row in rows if row.precision)),
        before=sum(known) if known else None,
        after=sum(row.after for row in rows),
        share=sum(row.share for row in rows),
    )


def _source_bytes(packed: PackedCheckpoint) -> dict[str, int]:
    """Bytes of every source tensor by name, from the manifest; empty without one."""
    if packed.manifest is None:
        return {}
    return {
        tensor.name: math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        for tensor in packed.manifest.source_tensors
    }
