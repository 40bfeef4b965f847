"""Entries of a packed folder that lowbit-convert wrote; it never removes any others."""

import hashlib
import re
from collections.abc import Collection
from pathlib import Path

from lowbit.convert.pipeline.journal import JOURNAL_FILE
from lowbit.formats.errors import FormatError, LowbitError
from lowbit.formats.file_names import CARDS, REPORT_FILES
from lowbit.formats.files.reading import read_bytes
from lowbit.formats.layout.manifest import MANIFEST_FILE, Manifest, read_manifest
from lowbit.formats.row_folders import entries, name_in, row_folders
from lowbit.formats.safetensors.hashing import hash_file
from lowbit.formats.tasks import TASKS_FILE

WEIGHTS = ".safetensors"
UNFINISHED = re.compile(r"\.(.+?)(?:\.\d+)?\.partial")  # the number is of the process
_MARK = re.compile(r"\n<!-- lowbit draft ([0-9a-f]{64}) -->\n\Z")  # of a card, with its hash
WRITTEN = {MANIFEST_FILE, JOURNAL_FILE}


def foreign_entries(folder: Path) -> list[str]:
    """Names of files that somebody else put into a packed folder, or has changed in it since.

    A weight file is compared by its size alone: hashing it takes long, and nobody edits one.

    Raises:
        LowbitError: lowbit.json is missing or cannot be read.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise FormatError(f"`{folder}` has no {MANIFEST_FILE}")
    return sorted(
        name
        for path in entries(folder)
        if not _is_ours(path, name := name_in(folder, path), manifest)
    )


def _is_ours(path: Path, name: str, manifest: Manifest) -> bool:
    if path.is_symlink() or path.is_dir():
        return False
    listed = {file.name: file for file in manifest.files}
    try:
        if name in listed:
            as_written = path.stat().st_size == listed[name].size_bytes and (
                name.endswith(WEIGHTS) or hash_file(path) == listed[name].sha256
            )
        elif name in CARDS:
            as_written = is_untouched_draft(path)
        else:
            as_written = (
                name in WRITTEN or name in REPORT_FILES or _is_unfinished(name, REPORT_FILES)
            )
    except LowbitError:  # a pipe, for instance
        return False
    return as_written


def remove_unfinished_reports(folder: Path) -> None:
    """Remove the files of a run that was killed while it wrote a report."""
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
    for path in list(entries(folder)):
        if path.name != MANIFEST_FILE:
            path.unlink()
    for path in row_folders(folder):
        path.rmdir()
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    folder.rmdir()


def marked(card: str) -> bytes:
    """The card with its own hash in a comment."""
    digest = hashlib.sha256(card.encode()).hexdigest()
    return f"{card}\n<!-- lowbit draft {digest} -->\n".encode()


def is_untouched_draft(path: Path) -> bool:
    """Tell whether `marked` made a card and nobody has edited it since.

    Raises:
        CheckpointError: a pipe, a device, or a link out of the folder.
    """
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return False
    text = content.decode(errors="replace").replace("\r\n", "\n")
    mark = _MARK.search(text)
    return mark is not None and hashlib.sha256(text[: mark.start()].encode()).hexdigest() == mark[1]
