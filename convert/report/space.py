"""Bytes by part of the model and precision, before and after packing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowbit.formats.architectures.table import Role
from lowbit.formats.draft_head import DRAFT_FILE
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
}
CARRIED = "vision tower"
DRAFT_HEAD = "draft head"
FILES = "config, tokenizer, other files"
SMALL = 0.005  # share of the folder below which parts are joined in one row


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of one part of the model in one precision.

    Attributes:
        part: part of the model, in words.
        precision: `INT4 g128`, or the dtype; empty for files.
        before: bytes in the source; None where not known, or where there was no such part.
        after: bytes in the folder, scales and shapes included.
        share: of the folder's bytes.
    """

    part: str
    precision: str
    before: int | None
    after: int
    share: float = 0.0


def where_bytes_went(packed: PackedCheckpoint, folder_bytes: int) -> list[Room]:
    """Bytes of the folder by part and precision, largest first; they add up to its size.

    Args:
        packed: the folder.
        folder_bytes: all its files, reports aside.
    """
    before = _source_bytes(packed)
    found = [
        Room(
            part=PARTS[spec.role],
            precision=str(packed.schemes.get(spec.module) or infos[0].dtype_name),
            before=before.get(spec.name),
            after=sum(info.nbytes for info in infos),
        )
        for spec, infos in ((spec, packed.tensors_of(spec)) for spec in packed.specs)
    ]
    found += [
        Room(CARRIED, info.dtype_name, before.get(info.name), info.nbytes)
        for info in packed.carried
    ]
    found += [
        Room(DRAFT_HEAD, "INT4", None, file.size_bytes)
        for file in (() if packed.manifest is None else packed.manifest.files)
        if file.name == DRAFT_FILE
    ]
    rest = folder_bytes - sum(room.after for room in found)
    if rest > 0:
        found.append(Room(FILES, "", None, rest))
    groups: dict[tuple[str, str], list[Room]] = {}
    for room in found:
        groups.setdefault((room.part, room.precision), []).append(room)
    rooms = sorted(map(_sum, groups.values()), key=lambda room: -room.after)
    rooms = [replace(room, share=room.after / max(1, folder_bytes)) for room in rooms]
    small = [room for room in rooms if room.share < SMALL]
    return rooms if len(small) < 2 else [*rooms[: -len(small)], _sum(small)]


def _sum(rooms: Sequence[Room]) -> Room:
    """One room for several, with all their names."""
    known = [room.before for room in rooms if room.before is not None]
    return Room(
        part=", ".join(dict.fromkeys(room.part for room in rooms)),
        precision=", ".join(dict.fromkeys(room.precision for room in rooms if room.precision)),
        before=sum(known) if known else None,
        after=sum(room.after for room in rooms),
        share=sum(room.share for room in rooms),
    )


def _source_bytes(packed: PackedCheckpoint) -> dict[str, int]:
    """Bytes of every source tensor by name, from the manifest; empty without one."""
    if packed.manifest is None:
        return {}
    return {
        tensor.name: math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        for tensor in packed.manifest.source_tensors
    }
