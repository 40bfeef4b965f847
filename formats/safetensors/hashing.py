"""SHA-256 of files and of the tensors inside them, in one pass and bounded memory."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from lowbit.formats.files.reading import open_file, reopen

if TYPE_CHECKING:
    from lowbit.formats.safetensors.checkpoint import TensorInfo  # needs torch

CHUNK_BYTES = 1 << 20


def hash_file(path: Path) -> str:
    """Hash a whole file of a model folder with SHA-256.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: see `open_file`.
    """
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tensor(path: Path, info: "TensorInfo") -> str:
    """Hash one tensor's bytes with SHA-256, as far as the file has them.

    Raises:
        CheckpointError: see `reopen`.
    """
    digest = hashlib.sha256()
    with reopen(path) as file:
        file.seek(info.offset)
        for chunk in _chunks(file, info.nbytes):
            digest.update(chunk)
    return digest.hexdigest()


def hash_shard(
    path: Path, tensors: "Iterable[TensorInfo]", progress: Callable[[int], None]
) -> tuple[str, dict[str, str]]:
    """Hash a safetensors file and every tensor in it, reading it once.

    Args:
        progress: called with the bytes done since the last call.

    Returns:
        SHA-256 of the file, and of each tensor by name.
    """
    whole = hashlib.sha256()
    parts = {}
    with open_file(path) as file, ThreadPoolExecutor(1) as beside:
        for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
            header = file.read(info.offset - file.tell())
            whole.update(header)
            progress(len(header))
            part = hashlib.sha256()
            for chunk in _chunks(file, info.nbytes):
                hashed = beside.submit(part.update, chunk)  # hashing leaves the interpreter free
                whole.update(chunk)
                hashed.result()
                progress(len(chunk))
            parts[info.name] = part.hexdigest()
        while chunk := file.read(CHUNK_BYTES):
            whole.update(chunk)
    return whole.hexdigest(), parts


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The next `size` bytes of a file, as far as it has them."""
    while size and (chunk := file.read(min(CHUNK_BYTES, size))):
        yield chunk
        size -= len(chunk)
