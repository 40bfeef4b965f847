"""The output folder: made beside its final place, filled, synced, and renamed into it."""

import os
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from lowbit.convert.calibration.store import PREFIX as CALIBRATED
from lowbit.convert.journal import JOURNAL_FILE
from lowbit.convert.plan import Plan
from lowbit.convert.stream import write_at
from lowbit.formats.errors import ResourceError
from lowbit.formats.hub import OTHER_WEIGHTS
from lowbit.formats.manifest import MANIFEST_FILE

# Files of a source folder that are not passed through: weights (converted, or in a format that is
# not read), their index, hidden files, and what this tool writes itself.
NOT_PASSED = (
    *("*.safetensors", "*.safetensors.index.json", *OTHER_WEIGHTS, ".*"),
    *("config.json", "lowbit.json", "quality.json", "quality.html", "tasks.json"),
    "SOURCE_README.md",
)
README = "README.md"
SOURCE_README = "SOURCE_README.md"  # what the original's becomes: its card is not ours


def check_apart(source: Path, out: Path) -> None:
    """Make sure that nothing of the source is written to.

    Raises:
        ResourceError: out contains the source or lies inside it.
    """
    theirs = source.resolve()
    for ours in (out, partial_of(out), _replaced_of(out)):
        if ours == theirs or theirs in ours.parents or ours in theirs.parents:
            raise ResourceError(
                f"`{ours}` and the source `{source}` overlap", hint="write to a folder beside it"
            )


def check_output(out: Path, overwrite: bool) -> None:
    """Make sure that the result can take its place at `out` when it is done.

    Args:
        out: resolved path.
        overwrite: whether a packed checkpoint there may be replaced.

    Raises:
        ResourceError: out is a file, is not empty or cannot be replaced, or what is built beside
            it would take the place of something else.
    """
    _check_beside(partial_of(out), JOURNAL_FILE)
    _check_beside(_replaced_of(out), MANIFEST_FILE)
    if not out.exists():
        return
    if not out.is_dir():
        raise ResourceError(f"`{out}` is a file, expected a folder to create")
    if out.is_mount() or out == Path.cwd():
        raise ResourceError(
            f"`{out}` is a mount point or the current folder, which no result can be renamed to",
            hint="name a folder inside it",
        )
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise ResourceError(
            f"`{out}` is not empty", hint="choose another folder, or replace it with --overwrite"
        )
    if not (out / MANIFEST_FILE).exists():
        raise ResourceError(
            f"`{out}` was not written by lowbit-convert (it has no {MANIFEST_FILE})",
            hint="--overwrite replaces packed checkpoints only; remove the folder yourself",
        )


def _check_beside(folder: Path, mark: str) -> None:
    """Refuse a folder in our way that an earlier conversion did not leave there."""
    if folder.is_dir() and (not any(folder.iterdir()) or (folder / mark).exists()):
        return
    if folder.exists():
        raise ResourceError(
            f"`{folder}` is in the way and was not left there by lowbit-convert",
            hint="move it away, or choose another output folder",
        )


def partial_of(out: Path) -> Path:
    """Where the conversion to `out` is built."""
    return out.with_name(out.name + ".partial")


def _replaced_of(out: Path) -> Path:
    """Where an old result waits for the new one to be in place."""
    return out.with_name(out.name + ".replaced")


def prepare_shards(plan: Plan, folder: Path) -> None:
    """Create every shard at full size with its header, keeping what an earlier run wrote.

    Everything else that an earlier run left is removed.

    Raises:
        OSError: the disk has not enough room, found out before any work.
    """
    wanted = {JOURNAL_FILE, *(shard.file for shard in plan.shards)}
    for stale in folder.iterdir():
        if stale.name not in wanted and not stale.name.startswith(CALIBRATED):
            stale.unlink()
    for shard in plan.shards:
        with (folder / shard.file).open("a+b") as file:
            os.posix_fallocate(file.fileno(), 0, shard.size)
            file.truncate(shard.size)
        with (folder / shard.file).open("r+b", buffering=0) as file:
            write_at(file.fileno(), 0, memoryview(shard.header))


def passed_through(names: Iterable[str]) -> list[str]:
    """Those of a source folder's files that the result carries unchanged."""
    return sorted(
        name for name in names if not any(fnmatchcase(name, pattern) for pattern in NOT_PASSED)
    )


def pass_through(source: Path, folder: Path) -> list[str]:
    """Copy every file of the source that the conversion does not replace; their names here.

    README.md, the card of the original, is copied as SOURCE_README.md.
    """
    names = passed_through(path.name for path in source.iterdir() if path.is_file())
    copies = {name: SOURCE_README if name == README else name for name in names}
    for name, copy in copies.items():
        shutil.copyfile(source / name, folder / copy)
    return list(copies.values())


def put_in_place(out: Path, overwrite: bool) -> None:
    """Sync every file and rename the folder to its final name; journal and old result go last.

    Raises:
        ResourceError: something has come to lie at `out` since the start.
    """
    partial, old = partial_of(out), _replaced_of(out)
    for path in partial.iterdir():
        if path.name.startswith(CALIBRATED):
            path.unlink()
        else:
            sync(path)
    sync(partial)
    check_output(out, overwrite)
    if out.exists() and any(out.iterdir()):
        if old.exists():
            shutil.rmtree(old)
        out.rename(old)
    partial.rename(out)
    (out / JOURNAL_FILE).unlink()
    sync(out)
    sync(out.parent)
    if old.exists():
        shutil.rmtree(old)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
