"""Files of a model folder: regular, inside the folder, and no longer than their kind can be."""

import os
import stat
from pathlib import Path

from lowbit.formats.errors import CheckpointError

MAX_TEXT_BYTES = 100_000_000  # of JSON, templates, cards; the largest tokenizers take 35 MB


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Content of a regular file of a model folder.

    Args:
        path: of the file; its parent is the model folder.
        max_bytes: longest content that is read.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: not a regular file, longer than `max_bytes`, or a link out of the folder.
    """
    check_inside(path)
    # A pipe would block the open, and a device may have no end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        _check_regular(status.st_mode, path)
        if status.st_size > max_bytes:
            raise CheckpointError(
                f"`{path}` has {status.st_size} bytes, expected at most {max_bytes}"
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes)
    finally:
        os.close(descriptor)


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Content of a UTF-8 text file of a model folder.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: see `read_bytes`; also text that is not UTF-8.
    """
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"`{path}` is not UTF-8 text: {error}") from None


def check_regular(path: Path) -> None:
    """Refuse pipes, devices, folders, and links that lead out of the folder.

    Args:
        path: of the file; its parent is the model folder.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: naming the file and what it is.
    """
    check_inside(path)
    _check_regular(path.stat().st_mode, path)


def check_inside(path: Path) -> None:
    """Refuse a link that leads out of its folder; links of a Hub cache to its blobs are right.

    Raises:
        CheckpointError: naming the link, but not where it leads.
    """
    if not path.is_symlink():
        return
    try:
        target, folder = path.resolve(), path.parent.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"`{path}` is a link that cannot be followed: {error}") from None
    if folder in target.parents:
        return
    repository = folder.parent.parent  # models--OWNER--NAME/snapshots/COMMIT
    if folder.parent.name == "snapshots" and target.parent == repository / "blobs":
        return
    raise CheckpointError(
        f"`{path}` is a symbolic link out of its folder",
        hint="replace the link by a copy of the file",
    )


def _check_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"`{path}` is {_kind(mode)}, expected a regular file")


def _kind(mode: int) -> str:
    for test, name in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ):
        if test(mode):
            return name
    return "no file"
