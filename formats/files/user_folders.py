"""Folders in the user's home for lowbit's cache and state."""

import os
from pathlib import Path


def user_folder(variable: str, default: str) -> Path:
    """The folder `lowbit` inside a folder of the XDG Base Directory Specification.

    Args:
        variable: `XDG_CACHE_HOME` or `XDG_STATE_HOME`; a path that is not absolute is ignored.
        default: folder below the home folder that stands in, `.cache`.

    Raises:
        RuntimeError: the user has no home folder.
    """
    given = Path(os.environ.get(variable, ""))
    return (given if given.is_absolute() else Path.home() / default) / "lowbit"
