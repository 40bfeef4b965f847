"""Bytes by part of the model and precision, before and after packing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lowbit.formats.architectures.table import Role
from lowbit.formats.draft_head import DRAFT_FILE
from lowbit.formats.packed import PackedCheckpoint
from lowbit.formats.safetensors.checkpoint import DTYPES, TensorInfo

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
    share: float


def where_bytes_went(packed: PackedCheckpoint, folder_bytes: int) -> list[Room]:
    """Bytes of the folder by part and precision, largest first; they add up to its size.

    Args:
        packed: the folder.
        folder_bytes: all its files, reports aside.
    """
    stored: dict[tuple[str, str], list[TensorInfo]] = {}
    sources: dict[tuple[str, str], list[str]] = {}
    for spec in packed.specs:
        infos = packed.tensors_of(spec)
        precision = str(packed.schemes.get(spec.module) or infos[0].dtype_name)
        key = PARTS[spec.role], precision
        stored.setdefault(key, []).extend(infos)
        sources.setdefault(key, []).append(spec.name)
    for info in packed.carried:
        key = CARRIED, info.dtype_name
        stored.setdefault(key, []).append(info)
        sources.setdefault(key, []).append(info.name)
    before = _source_bytes(packed)
    rooms = [
        _room(key, infos, [before.get(name) for name in sources[key]], folder_bytes)
        for key, infos in stored.items()
    ]
    if packed.manifest is not None:
        rooms += [
            Room(DRAFT_HEAD, "INT4", None, file.size_bytes, file.size_bytes / folder_bytes)
            for file in packed.manifest.files
            if file.name == DRAFT_FILE
        ]
    rest = folder_bytes - sum(room.after for room in rooms)
    if rest > 0:
        rooms.append(Room(FILES, "", None, rest, rest / folder_bytes))
    return _joined(sorted(rooms, key=lambda room: -room.after))


def _room(
    key: tuple[str, str],
    infos: Sequence[TensorInfo],
    before: Sequence[int | None],
    folder_bytes: int,
) -> Room:
    known = [count for count in before if count is not None]
    after = sum(info.nbytes for info in infos)
    return Room(*key, sum(known) if known else None, after, after / max(1, folder_bytes))


def _source_bytes(packed: PackedCheckpoint) -> dict[str, int]:
    """Bytes of every source tensor by name, from the manifest; empty without one."""
    if packed.manifest is None:
        return {}
    return {
        tensor.name: math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        for tensor in packed.manifest.source_tensors
    }


def _joined(rooms: list[Room]) -> list[Room]:
    """The rooms, with the small ones joined in one at the end."""
    small = [room for room in rooms if room.share < SMALL]
    if len(small) < 2:
        return rooms
    known = [room.before for room in small if room.before is not None]
    joined = Room(
        part=", ".join(dict.fromkeys(room.part for room in small)),
        precision=", ".join(dict.fromkeys(room.precision for room in small if room.precision)),
        before=sum(known) if known else None,
        after=sum(room.after for room in small),
        share=sum(room.share for room in small),
    )
    return [*(room for room in rooms if room.share >= SMALL), joined]
