"""Size of a model's folder, as every command states it and as --target-size bounds it.

Counted are the bytes of all files, those of folders below included; a link counts as the file that
it leads to. Reports and cards do not count, which are written about a folder afterwards: its size
is the same before it is measured, after, and on the Hub.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from lowbit.formats.file_names import REPORT_FILES
from lowbit.formats.files.atomic import abandoned


def folder_bytes(folder: Path) -> int:
    """Bytes of a folder on this machine; files that cannot be seen are left out."""
    return counted_bytes(dict(_sizes(folder)))


def counted_bytes(sizes: Mapping[str, int]) -> int:
    """Bytes of a folder by a list of its files: size by name, `draft/head.safetensors`."""
    return sum(size for name, size in sizes.items() if _counts(name))


def size(count: int) -> str:
    """Bytes for people, in units of a thousand: `5.62 MB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"


def _counts(name: str) -> bool:
    """False for a report or a card, and for one that a killed writer has left half-written."""
    return name not in REPORT_FILES and abandoned(Path(name)) not in REPORT_FILES


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            try:
                yield path.relative_to(folder).as_posix(), path.stat().st_size
            except OSError:
                continue
