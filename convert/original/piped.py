"""A calibration text from a pipe, `<(zcat text.gz)`, as a file that can be read again."""

import json
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lowbit.convert.original.calibration_text import WHAT
from lowbit.formats.files.atomic import disk_errors
from lowbit.formats.files.user_file import read_user_file


@contextmanager
def rereadable(path: Path) -> Iterator[Path]:
    """The path itself, or for a pipe a temporary file with its content.

    The file's name tells what its first line is: `pipe.jsonl` after an object of `text` or
    `messages`, else `pipe.txt`.

    Args:
        path: as the user gave it.

    Raises:
        RequestError: the pipe cannot be read; see `read_user_file`.
        ResourceError: the temporary file cannot be written.
    """
    if not _is_pipe(path):
        yield path
        return
    content = read_user_file(path, WHAT)
    with ExitStack() as stack:
        with disk_errors():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lowbit-"))
            copy = Path(folder) / ("pipe.jsonl" if _is_jsonl(content) else "pipe.txt")
            copy.write_bytes(content)
        yield copy


def _is_pipe(path: Path) -> bool:
    try:
        return stat.S_ISFIFO(path.stat().st_mode)
    except (OSError, ValueError):
        return False  # reading it will say why


def _is_jsonl(content: bytes) -> bool:
    try:
        first = json.loads(content.lstrip().partition(b"\n")[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and not first.keys().isdisjoint({"text", "messages"})
