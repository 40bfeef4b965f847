"""Earlier input, kept from one chat to the next; a file that fails is never an error."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from lowbit.formats.files.user_folders import user_folder


def history_file() -> Path:
    """File that keeps the input: below XDG_STATE_HOME, or ~/.local/state."""
    return user_folder("XDG_STATE_HOME", ".local/state") / "history"


def open_history(path: Path | None) -> History:
    """History in a file that only its owner may read; in memory where there can be none.

    Args:
        path: None keeps the history in memory.
    """
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A pipe in its place would block an open.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)
    except OSError:
        regular = False
    return _TolerantHistory(path) if regular else InMemoryHistory()


class _TolerantHistory(FileHistory):
    """A file history that goes on in memory where its file fails later: a full disk, say."""

    def load_history_strings(self) -> Iterable[str]:
        """Entries of the file, newest first."""
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        """Append an entry to the file."""
        try:
            super().store_string(string)
        except OSError:
            return
