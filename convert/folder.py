"""The output folder: made beside its final place, filled, synced, and renamed into it."""

import os
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from lowbit.convert.plan import Plan
from lowbit.convert.stream import disk_error, write_at
from lowbit.formats.errors import ResourceError
from lowbit.formats.hub import OTHER_WEIGHTS
from lowbit.formats.manifest import MANIFEST_FILE

# Files of a source folder that are not passed through: weights (converted, or in a format that is
# not read), their index, hidden files, and what this tool writes itself.
NOT_PASSED = (
    *("*.safetensors", "*.safetensors.index.json", *OTHER_WEIGHTS, ".*"),
    *("config.json", "lowbit.json", "quality.json", "quality.html"),
)


def check_output(source: Path, out: Path, overwrite: bool) -> None:
    """Make sure that the result can take its place at `out` when it is done.

    Raises:
        ResourceError: out is a file, is not empty, or contains or lies inside the source.
    """
    ours, theirs = out.resolve(), source.resolve()
    if ours == theirs or theirs in ours.parents or ours in theirs.parents:
        raise ResourceError(
            f"`{out}` and the source `{source}` overlap", hint="write to a folder beside it"
        )
    if out.exists() and not out.is_dir():
        raise ResourceError(f"`{out}` is a file, expected a folder to create")
    if not out.exists() or not any(out.iterdir()):
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


def partial_of(out: Path) -> Path:
    """Where the conversion to `out` is built."""
    return out.with_name(out.name + ".partial")


def prepare_shards(plan: Plan, folder: Path) -> None:
    """Create every shard at full size with its header, keeping what an earlier run wrote.

    Raises:
        ResourceError: the disk has not enough room, found out before any work.
    """
    wanted = {shard.file for shard in plan.shards}
    for stale in folder.glob("*.safetensors"):
        if stale.name not in wanted:
            stale.unlink()
    for shard in plan.shards:
        with (folder / shard.file).open("a+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, shard.size)
            except OSError as error:
                raise disk_error(error) from None
            file.truncate(shard.size)
        with (folder / shard.file).open("r+b", buffering=0) as file:
            write_at(file.fileno(), 0, memoryview(shard.header))


def write_file(path: Path, content: bytes) -> None:
    """Write a small file.

    Raises:
        ResourceError: the disk is full.
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        raise disk_error(error) from None


def passed_through(names: Iterable[str]) -> list[str]:
    """Those of a source folder's files that the result carries unchanged."""
    return sorted(
        name for name in names if not any(fnmatchcase(name, pattern) for pattern in NOT_PASSED)
    )


def pass_through(source: Path, folder: Path) -> list[str]:
    """Copy every file of the source that the conversion does not replace; their names."""
    names = passed_through(path.name for path in source.iterdir() if path.is_file())
    for name in names:
        try:
            shutil.copyfile(source / name, folder / name)
        except OSError as error:
            raise disk_error(error) from None
    return names


def put_in_place(partial: Path, out: Path) -> None:
    """Sync every file and rename the folder to its final name; an old result goes last."""
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    old = out.with_name(out.name + ".replaced")
    if out.exists() and any(out.iterdir()):
        if old.exists():
            shutil.rmtree(old)
        out.rename(old)
    partial.rename(out)
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
