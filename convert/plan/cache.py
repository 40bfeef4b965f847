"""Cache of sensitivities in files below the user's cache folder."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lowbit.convert.original.progress import Meter, Progress
from lowbit.formats.files.atomic import check_place, disk_errors, replace_files
from lowbit.formats.files.user_folders import user_folder
from lowbit.formats.layout.manifest import SourceTensor, weights_digest
from lowbit.formats.machine.cores import core_count
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.formats.safetensors.hashing import hash_tensor

ROOM_BYTES = 2_000_000  # the figures of the largest models, and their plot, take less


def cache_file(identity: dict[str, Any]) -> Path:
    """Path of the figures with this identity, below XDG_CACHE_HOME or ~/.cache.

    Args:
        identity: all that the figures depend on, as JSON values.
    """
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return user_folder("XDG_CACHE_HOME", ".cache") / "sensitivity" / f"{name[:32]}.json"


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and the folders above it.

    Raises:
        ResourceError: the place cannot be written to, or the disk is full.
    """
    with disk_errors(path=path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_files({path: content})


def check_file(path: Path) -> None:
    """Make sure, before the computation, that `write_file` can write its figures.

    Raises:
        ResourceError: as `write_file`.
    """
    with disk_errors(path=path):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_place(path, ROOM_BYTES)


def hash_weights(checkpoint: Checkpoint, progress: Progress) -> str:
    """Hash over all tensors, `weights_sha256` of lowbit.json.

    Args:
        checkpoint: the checkpoint to read.
        progress: called with ("source", bytes done, bytes in all).
    """
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    meter = Meter(progress, "source", total)

    def one(name: str) -> SourceTensor:
        info = checkpoint.tensors[name]
        digest = hash_tensor(checkpoint.folder / info.file, info)
        meter.add(info.nbytes)
        return SourceTensor(name, info.dtype_name, info.shape, "copied", "", digest)

    with ThreadPoolExecutor(core_count()) as pool:
        return weights_digest(pool.map(one, checkpoint.tensors))
