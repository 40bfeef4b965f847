"""Files that appear whole or not at all, and file system errors as ResourceError."""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lowbit.formats.errors import ResourceError
from lowbit.formats.machine.system import FREE_SPACE, of_system

PARTIAL_NAME = re.compile(r"\.(.+)\.\d+\.partial", re.DOTALL)
MAX_NAME = 56  # characters of a name kept in its temporary name: up to 4 bytes each, of 255


@contextmanager
def disk_errors(hint: str = FREE_SPACE, path: Path | None = None) -> Iterator[None]:
    """Turn an OSError inside the block into a ResourceError that names the file, if known.

    Args:
        hint: shown where the disk is full.
        path: of the file that the block writes; the error's own where left out.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the output has left, which is no disk error
    except OSError as error:
        raise of_system(error, path, hint) from error


def replace_files(contents: Mapping[Path, bytes], mode: int = 0o666) -> None:
    """Give files their new content; a reader sees the old content or all of the new.

    All are written beside their places before the first is renamed, so that a full disk changes
    none.

    Args:
        mode: of the files, before the umask.

    Raises:
        ResourceError: naming the first file that cannot be written.
    """
    partials = {path: _partial_of(path) for path in contents}
    try:
        for path, content in contents.items():
            with disk_errors(path=path):
                write_synced(partials[path], content, mode)
        for path, partial in partials.items():
            with disk_errors(path=path):
                partial.replace(path)
    finally:
        for partial in partials.values():
            _remove(partial)


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Give one file its new content; see `replace_files`.

    Raises:
        ResourceError: it cannot be written.
    """
    replace_files({path: content}, mode)


def replace_file_by_parts(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Give one file new content that is never whole in memory; see `replace_files`.

    Raises:
        ResourceError: it cannot be written.
    """
    partial = _partial_of(path)
    try:
        with disk_errors(path=path):
            write_synced(partial, parts)
            partial.replace(path)
    finally:
        _remove(partial)


def write_synced(
    path: Path, content: bytes | Iterable[bytes | memoryview], mode: int = 0o666
) -> None:
    """Write a new file and flush it to the disk; a file or link of that name is replaced."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)
        file.flush()
        os.fsync(file.fileno())


def check_place(path: Path, room_bytes: int = 0) -> None:
    """Refuse, before long work, a file that cannot be written.

    Args:
        room_bytes: bytes that must be free; as many are written beside the file and removed again.

    Raises:
        ResourceError: the folder cannot be written to, a folder has the file's name, or the disk
            is full.
    """
    partial = _partial_of(path)
    with disk_errors(path=path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try:
            write_synced(partial, bytes(room_bytes))
        finally:
            _remove(partial)


def attempt(write: Callable[[], object]) -> ResourceError | None:
    """Carry out a write and return its failure, to be raised after the figures are shown."""
    try:
        with disk_errors():
            write()
    except ResourceError as error:
        return error
    return None


def abandoned(path: Path) -> str | None:
    """Name of the file that a writer was at when it was killed; None of other files.

    Names longer than `MAX_NAME` are cut.
    """
    match = PARTIAL_NAME.fullmatch(path.name)
    return None if match is None else match[1]


def _partial_of(path: Path) -> Path:
    return path.with_name(f".{path.name[:MAX_NAME]}.{os.getpid()}.partial")


def _remove(partial: Path) -> None:
    # A read-only file system refuses this even if there is nothing to remove.
    with suppress(OSError):
        partial.unlink(missing_ok=True)
