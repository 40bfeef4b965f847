"""Reading of files of a model folder: regular ones, inside the folder, of bounded length.

A model folder comes from strangers. A pipe in it would block a reader, a device has no end, and a
link out of the folder would carry a private file into the result and onto the Hub.
"""

import errno
import io
import os
import re
import stat
from pathlib import Path

from lowbit.formats.errors import CheckpointError
from lowbit.formats.machine.system import GONE, check_system

MAX_TEXT_BYTES = 64_000_000  # bound of JSON, templates and cards; tokenizers reach 35 MB
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # a file's name in a Hub cache is its hash


def open_file(path: Path) -> io.BufferedReader:
    """Open a regular file of a model folder for reading, without blocking on a pipe.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: not a regular file, a link out of the folder or to nothing, or a file that
            may not be read.
    """
    check_regular(path)
    return reopen(path)


def reopen(path: Path) -> io.BufferedReader:
    """Open a file that `open_file` has opened before, without checking its links again.

    Raises:
        CheckpointError: it is not a regular file any more, or may not be read.
        ResourceError: on Windows.
    """
    check_system()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        _check_mode(os.fstat(descriptor).st_mode, path)  # the file may have been exchanged
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Content of a regular file of a model folder.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: see `open_file`; also a file longer than `max_bytes`.
    """
    with open_file(path) as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise _unreadable(path, error) from None
        if len(content) > max_bytes:
            size = os.fstat(file.fileno()).st_size
            raise CheckpointError(f"`{path}` has {size} bytes, expected at most {max_bytes}")
    return content


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


def check_regular(path: Path, folder: Path | None = None) -> None:
    """Refuse pipes, devices, folders, and links that lead out of the model folder.

    Args:
        folder: the model folder; the parent of `path` where left out.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: naming the file and its kind.
    """
    try:
        check_inside(path, folder)
        _check_mode(path.stat().st_mode, path)
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(
                f"`{path}` is a link to a file that is missing",
                hint="download the model again, or replace the link by a copy of the file",
            ) from None
        raise
    except ValueError:  # NUL, or half a surrogate pair
        raise CheckpointError(f"`{path}` cannot be the name of a file") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def check_inside(path: Path, folder: Path | None = None) -> None:
    """Refuse a link that leads out of the model folder, unless it leads into a Hub cache.

    The folder itself may be a link.

    Args:
        folder: the model folder; the parent of `path` where left out.

    Raises:
        CheckpointError: naming the link, but not where it leads.
    """
    if not path.is_symlink() and (folder is None or path.parent == folder):
        return
    try:
        target, root = path.resolve(), (folder or path.parent).resolve()
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        raise CheckpointError(f"`{path}` is a link that cannot be followed") from None
    if root in target.parents or _in_hub_cache(target, root):
        return
    raise CheckpointError(
        f"`{path}` is a symbolic link out of its folder",
        hint="replace the link by a copy of the file",
    )


def _in_hub_cache(target: Path, folder: Path) -> bool:
    """Tell if a link leads to a blob of its snapshot's repository, or to any blob named by hash.

    Snapshots link to `../../blobs`; `hf download --local-dir` of older releases linked into the
    cache from anywhere.
    """
    blobs = target.parent
    if folder.parent.name == "snapshots" and blobs == folder.parent.parent / "blobs":
        return True
    is_repository = blobs.name == "blobs" and blobs.parent.name.startswith("models--")
    return is_repository and BLOB.fullmatch(target.name) is not None


def _check_mode(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"`{path}` is {kind_of(mode)}, expected a regular file",
            hint="replace it by a regular file, or remove it",
        )


def kind_of(mode: int) -> str:
    """Kind of a file from its mode, in words: "a pipe"."""
    for test, name in (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ):
        if test(mode):
            return name
    return "no file"


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    hint = GONE if error.errno == errno.ENOENT else None
    return CheckpointError(f"`{path}` cannot be read: {error.strerror or error}", hint=hint)
