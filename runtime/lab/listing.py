"""Models on this machine: in folders, and in the cache of the Hub; only headers are read."""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from lowbit.formats.errors import CheckpointError, LowbitError, UnsupportedModelError
from lowbit.formats.file_names import QUALITY_FILE
from lowbit.formats.folder_size import folder_bytes
from lowbit.formats.judgement import Judgement, read_judgement
from lowbit.formats.layout.manifest import MANIFEST_FILE, Manifest
from lowbit.formats.layout.quantization_config import method_of
from lowbit.formats.machine.system import explained
from lowbit.formats.packed import PackedCheckpoint, open_packed
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE
from lowbit.formats.weight_bits import weight_bits

Kind = Literal["packed", "original", "broken"]
EXPECTED = (LowbitError, OSError, RuntimeError, UnicodeError, MemoryError)
SIGNS = (CONFIG_FILE, MANIFEST_FILE)  # a folder with one of them is meant to be a model
PARTIAL = ".partial"  # ends the name of a conversion that is not done


@dataclass(frozen=True, slots=True)
class Listed:
    """A model, or what is left of one."""

    name: str  # a folder as it was named, or a Hub id
    folder: str  # that holds its files
    in_cache: bool  # it is in the cache of the Hub
    kind: Kind  # packed, original (to be converted), or broken
    size_bytes: int  # of its files, reports and cards aside
    date: str | None  # of its config, `2026-05-31`; None if that is missing
    recipe: str | None = None  # by which it was packed, or the dtype of an original; None if broken
    bits_per_weight: float | None = None  # of its weight files; None if broken
    judgement: Judgement | None = None  # of its report; None without one
    problem: str = ""  # why it is broken, or its report cannot be read; empty otherwise


@dataclass(frozen=True, slots=True)
class Cache:
    """The models in the cache of the Hub."""

    folder: str  # of the cache
    models: tuple[Listed, ...]  # those that lowbit reads
    others: int  # number of models that it does not


def in_folder(folder: Path) -> list[Listed]:
    """The model in a folder, and those one level below.

    Raises:
        CheckpointError: there is no such folder.
        OSError: it cannot be read.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"`{folder}` {what}")
    below = sorted(folder.iterdir())
    found = [path for path in (folder, *below) if _is_meant(path)]
    return [describe(path, str(path)) for path in found]


def in_cache() -> Cache:
    """The models in the cache of huggingface_hub."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    place = constants.HF_HUB_CACHE
    try:
        scanned = scan_cache_dir(place)
    except (CacheNotFound, ValueError):  # none, or a file
        return Cache(place, (), 0)
    found, others = [], 0
    for repo in sorted(scanned.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        current = max(repo.revisions, key=lambda it: ("main" in it.refs, it.last_modified))
        if not _has(current.snapshot_path, CONFIG_FILE):
            others += 1
            continue
        model = _try(current.snapshot_path, repo.repo_id, cached=True)
        if isinstance(model, UnsupportedModelError):
            others += 1
        else:
            found.append(model)
    for problem in scanned.warnings:
        words = str(problem).splitlines()[0]
        found.append(Listed("?", place, True, "broken", 0, None, problem=words))
    return Cache(place, tuple(found), others)


def describe(folder: Path, name: str, cached: bool = False) -> Listed:
    """A model of which nothing is taken for granted."""
    found = _try(folder, name, cached)
    if isinstance(found, UnsupportedModelError):
        return _broken(folder, name, cached, found)
    return found


def _try(folder: Path, name: str, cached: bool) -> Listed | UnsupportedModelError:
    """A model, broken or not; the error of one that lowbit does not know."""
    if folder.name.endswith(PARTIAL):
        unfinished = CheckpointError("a conversion that is not done; the same command continues it")
        return _broken(folder, name, cached, unfinished)
    try:
        return _whole(open_packed(folder), name, cached)
    except UnsupportedModelError as error:
        return error
    except EXPECTED as error:
        known = explained(error)
        if known is None:
            raise
        return _broken(folder, name, cached, known)


def _whole(packed: PackedCheckpoint, name: str, cached: bool) -> Listed:
    checkpoint, folder = packed.checkpoint, packed.checkpoint.folder
    judgement, problem = None, ""
    try:
        judgement = read_judgement(folder)
    except EXPECTED as error:
        problem = f"{QUALITY_FILE}: {explained(error) or error}"
    largest = max(checkpoint.tensors.values(), key=lambda info: info.nbytes)
    is_packed = any(packed.schemes.values())
    method = method_of(checkpoint.config)
    return Listed(
        name=name,
        folder=str(folder),
        in_cache=cached,
        kind="packed" if is_packed else "original",
        size_bytes=folder_bytes(folder),
        date=_date(folder),
        recipe=_recipe(packed.manifest) or method if is_packed else largest.dtype_name,
        bits_per_weight=weight_bits(checkpoint, packed.manifest),
        judgement=judgement,
        problem=problem,
    )


def _broken(folder: Path, name: str, cached: bool, error: LowbitError) -> Listed:
    facts = name, str(folder), cached
    return Listed(*facts, "broken", folder_bytes(folder), _date(folder), problem=str(error))


def _recipe(manifest: Manifest | None) -> str | None:
    """`int4 gptq+rotate`; None where lowbit.json names none."""
    recipe = {} if manifest is None else manifest.recipe
    words = [recipe.get("recipe"), recipe.get("method")]
    return " ".join(word for word in words if isinstance(word, str)) or None


def _is_meant(folder: Path) -> bool:
    """Tell if a folder is, was or becomes a model."""
    if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises where it may not look
        return False
    return any(_has(folder, name) for name in SIGNS) or folder.name.endswith(PARTIAL)


def _has(folder: Path, name: str) -> bool:
    return os.path.lexists(folder / name)


def _date(folder: Path) -> str | None:
    for name in (MANIFEST_FILE, CONFIG_FILE):
        try:
            seconds = (folder / name).stat().st_mtime
        except OSError:
            continue
        try:
            return datetime.fromtimestamp(seconds, UTC).date().isoformat()
        except (OverflowError, ValueError, OSError):  # a date that no calendar has
            return None
    return None
