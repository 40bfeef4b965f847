"""Which entries of a packed folder lowbit-convert wrote; only those may it ever remove."""

import re
from collections.abc import Collection
from pathlib import Path

from lowbit.convert.draft import is_untouched_draft
from lowbit.convert.journal import JOURNAL_FILE
from lowbit.convert.quality.build import REPORT_FILES
from lowbit.formats.errors import FormatError, LowbitError
from lowbit.formats.hashing import hash_file
from lowbit.formats.manifest import MANIFEST_FILE, Manifest, read_manifest
from lowbit.formats.tasks import TASKS_FILE

WEIGHTS = ".safetensors"
UNFINISHED = re.compile(r"\.(.+?)(?:\.\d+)?\.partial")  # the number is of the process
CARDS = ("README.md", "MODEL_CARD.md")  # a person may have edited them
# Written in one piece, with a name of its own until it is whole.
REPORTS = {*REPORT_FILES, TASKS_FILE}
WRITTEN = {MANIFEST_FILE, JOURNAL_FILE}


def foreign_entries(folder: Path) -> list[str]:
    """Names of what somebody else put into a packed folder, or has changed in it since.

    A weight file counts as written by its name alone: hashing it takes long, and nobody edits one.

    Raises:
        LowbitError: lowbit.json is missing or cannot be read.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise FormatError(f"`{folder}` has no {MANIFEST_FILE}")
    return sorted(path.name for path in folder.iterdir() if not _is_ours(path, manifest))


def _is_ours(path: Path, manifest: Manifest) -> bool:
    name = path.name
    if path.is_symlink() or path.is_dir():
        return False
    listed = {file.name: file for file in manifest.files}
    try:
        if name in listed:
            as_written = name.endswith(WEIGHTS) or hash_file(path) == listed[name].sha256
        elif name in CARDS:
            as_written = is_untouched_draft(path)
        else:
            as_written = name in WRITTEN or name in REPORTS or _is_unfinished(name, REPORTS)
    except LowbitError:  # a pipe, for instance
        return False
    return as_written


def remove_unfinished_reports(folder: Path) -> None:
    """Remove what a run left that was killed while it wrote a report."""
    names = REPORT_FILES - {TASKS_FILE}  # which another process may be writing
    for path in list(folder.iterdir()):
        if _is_unfinished(path.name, names):
            path.unlink(missing_ok=True)


def _is_unfinished(name: str, reports: Collection[str]) -> bool:
    """Tell whether a name is that of a report that was being written, by any process."""
    match = UNFINISHED.fullmatch(name)
    return match is not None and match[1] in reports


def remove_owned(folder: Path) -> None:
    """Remove a packed folder, each file by its name and lowbit.json last.

    Call `foreign_entries` before. Interrupted, the folder is still known as ours.

    Raises:
        OSError: something has been put there since.
    """
    for path in folder.iterdir():
        if path.name != MANIFEST_FILE:
            path.unlink()
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    folder.rmdir()
