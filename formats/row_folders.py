"""Folders inside a packed one that hold rows of its head, each in a file.

They are folders since engines take every safetensors file at the top for the model's.
"""

from collections.abc import Iterator
from pathlib import Path

from lowbit.formats.draft_head import DRAFT_FILE, DRAFT_FOLDER
from lowbit.formats.frequent_rows import FREQUENT_FILE, FREQUENT_FOLDER

ROW_FILES = (DRAFT_FILE, FREQUENT_FILE)


def entries(folder: Path) -> Iterator[Path]:
    """Entries of a packed folder, the files of its row folders in place of those."""
    inner = row_folders(folder)
    for path in folder.iterdir():
        if path in inner:
            yield from path.iterdir()
        else:
            yield path


def row_folders(folder: Path) -> list[Path]:
    """The folders with rows of the head that a packed folder has."""
    paths = (folder / name for name in (DRAFT_FOLDER, FREQUENT_FOLDER))
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def name_in(folder: Path, path: Path) -> str:
    """Name of an entry as lowbit.json has it: `draft/head.safetensors`."""
    return path.relative_to(folder).as_posix()
