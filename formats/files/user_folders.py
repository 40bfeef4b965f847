"""Folders of the user's own in which lowbit keeps what is not part of any model."""

import os
from pathlib import Path


def user_folder(variable: str, default: str) -> Path:
    """The folder `lowbit` below one that the XDG Base Directory Specification names.

    Args:
        variable: `XDG_CACHE_HOME` or `XDG_STATE_HOME`; one that is not absolute does not count.
        default: below the home folder, `.cache`.

    Raises:
        RuntimeError: the user has no home folder.
    """
    given = Path(os.environ.get(variable, ""))
    return (given if given.is_absolute() else Path.home() / default) / "lowbit"
