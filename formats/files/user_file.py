"""Text files that a user names: regular files and pipes, `<(zcat text.gz)`, but no devices."""

import os
import select
import stat
from pathlib import Path

from lowbit.formats.errors import RequestError
from lowbit.formats.files.reading import kind_of
from lowbit.formats.machine.system import check_system

MAX_BYTES = 256_000_000
WRITER_S = 5.0  # wait for a writer to open a named pipe
SILENCE_S = 60.0  # wait for a writer's next byte
CHUNK_BYTES = 1 << 20


def read_user_file(path: Path, what: str, most_bytes: int = MAX_BYTES) -> bytes:
    """Read a file, or a pipe until its writers close it.

    Args:
        path: as the user gave it; it may be a link.
        what: names the file in messages: "evaluation text".
        most_bytes: longest content.

    Raises:
        RequestError: it cannot be read, is a folder, a device or a socket, is longer than
            `most_bytes`, or is a pipe that nobody writes to.
        ResourceError: on Windows.
    """
    check_system()
    where = f"{what} `{path}`"
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
            raise RequestError(f"{where} is {kind_of(mode)}, expected a file")
        # A named pipe without a writer would block the open.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _read(descriptor, stat.S_ISFIFO(mode), where, most_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RequestError(f"{where} cannot be read: {error.strerror}") from None
    except ValueError:
        raise RequestError(f"{where} cannot be the name of a file") from None


def _read(descriptor: int, is_pipe: bool, where: str, most_bytes: int) -> bytes:
    content = bytearray()
    while True:
        try:
            chunk = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:  # the writer has not written yet
            silent = f"{where} is a pipe that sent nothing for {SILENCE_S:g} seconds"
            _wait(descriptor, SILENCE_S, silent)
            continue
        content += chunk
        if len(content) > most_bytes:
            raise RequestError(f"{where} is longer than {most_bytes} bytes")
        if chunk:
            continue
        if content or not is_pipe or select.select([descriptor], [], [], 0)[0]:
            return bytes(content)  # a pipe is ready once its writers have closed it
        _wait(descriptor, WRITER_S, f"{where} is a pipe that nobody writes to")


def _wait(descriptor: int, seconds: float, otherwise: str) -> None:
    """Wait until a descriptor can be read or has ended."""
    if not select.select([descriptor], [], [], seconds)[0]:
        raise RequestError(otherwise)


def read_text_file(path: Path, what: str) -> str:
    """Read a text file that a user named; line ends become LF.

    Args:
        what: names the file in messages: "evaluation text".

    Raises:
        RequestError: the file cannot be read as UTF-8 text; see `read_user_file`.
    """
    try:
        text = read_user_file(path, what).decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{what} `{path}` is not UTF-8: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
