"""The output folder: made beside its final place, filled, synced, and renamed into it."""

import hashlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from lowbit.convert.pipeline.journal import JOURNAL_FILE, Journal, open_journal
from lowbit.convert.pipeline.output_dir import partial_of, place_of, replaced_of
from lowbit.convert.pipeline.owned import foreign_entries, remove_owned
from lowbit.convert.pipeline.stream import write_at
from lowbit.convert.plan.plan import Plan
from lowbit.convert.quantize.store import PREFIX as CALIBRATED
from lowbit.formats.errors import CheckpointError, LowbitError, ResourceError
from lowbit.formats.file_names import NEVER_PASSED, README, SOURCE_README
from lowbit.formats.files.reading import open_file, read_text
from lowbit.formats.hub.locate import OTHER_WEIGHTS
from lowbit.formats.kept_vocabulary import read_kept_vocabulary
from lowbit.formats.layout.manifest import MANIFEST_FILE, json_bytes
from lowbit.formats.machine.system import FREE_SPACE, FULL
from lowbit.formats.row_folders import entries, name_in, row_folders
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE, INDEX_FILE, read_json
from lowbit.formats.safetensors.hashing import hash_file
from lowbit.formats.safetensors.shards import index_json
from lowbit.formats.text.settings import MAX_SETTINGS_BYTES
from lowbit.formats.text.template import load_chat_template
from lowbit.formats.text.tokenizer import TOKENIZER_FILE, load_text_tokenizer

# Files of a source folder that are not passed through: weights (converted, or in a format that is
# not read), their index, hidden files, and what this tool writes itself.
NOT_PASSED = (
    *("*.safetensors", "*.safetensors.index.json", *OTHER_WEIGHTS, ".*"),
    *(CONFIG_FILE, *NEVER_PASSED),
)
# Passed through and read again by lowbit-run: they are checked before the work.
READ_JSON = ("generation_config.json", "tokenizer_config.json")
TEMPLATES = "*.jinja"
NEVER_FOLDERS = ("*.json", TEMPLATES)  # other folders are left out of the result


def check_apart(source: Path, out: Path) -> None:
    """Make sure that nothing of the source is written to.

    Raises:
        ResourceError: out contains the source or lies inside it.
    """
    theirs = source.resolve()
    for ours in (out, partial_of(out), replaced_of(out)):
        if ours == theirs or theirs in ours.parents or ours in theirs.parents:
            raise ResourceError(
                f"`{ours}` and the source `{source}` overlap", hint="write to a folder beside it"
            )


def check_output(out: Path, overwrite: bool) -> None:
    """Make sure that the result can take its place at `out` when it is done.

    Raises:
        ResourceError: out is a file, is not empty or cannot be replaced, holds a file that
            lowbit-convert did not write, or what is built beside it would take the place of
            something else.
    """
    _check_beside(partial_of(out), JOURNAL_FILE)
    replaced = replaced_of(out)
    _check_beside(replaced, MANIFEST_FILE)
    if (replaced / MANIFEST_FILE).exists():
        _check_owned(replaced)
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
            f"`{out}` is not empty",
            hint="choose another folder, or replace it with --overwrite"
            if (out / MANIFEST_FILE).exists()
            else "choose another folder",
        )
    if not (out / MANIFEST_FILE).exists():
        raise ResourceError(
            f"`{out}` was not written by lowbit-convert (it has no {MANIFEST_FILE})",
            hint="--overwrite replaces packed checkpoints only; remove the folder yourself",
        )
    _check_owned(out)


def _check_beside(folder: Path, mark: str) -> None:
    """Refuse a folder in our way that an earlier conversion did not leave there."""
    if folder.is_dir() and (not any(folder.iterdir()) or (folder / mark).exists()):
        return
    if os.path.lexists(folder):
        raise ResourceError(
            f"`{folder}` is in the way and was not left there by lowbit-convert",
            hint="move it away, or choose another output folder",
        )


def _check_owned(folder: Path) -> None:
    try:
        foreign = foreign_entries(folder)
    except LowbitError as error:
        raise ResourceError(
            f"nothing says which files of `{folder}` lowbit-convert wrote: {error}",
            hint="remove the folder yourself, or choose another output folder",
        ) from None
    if foreign:
        more = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
        raise ResourceError(
            f"`{folder / foreign[0]}`{more} was not written by lowbit-convert or was changed since",
            hint="move it away; --overwrite removes only what lowbit-convert wrote",
        )


def prepare_shards(plan: Plan, folder: Path) -> None:
    """Create every shard at full size with its header, keeping what an earlier run wrote.

    Everything else that an earlier run left is removed.

    Raises:
        ResourceError: the disk has not enough room, found out before any work.
    """
    remove_stale(folder, {JOURNAL_FILE, *(shard.file for shard in plan.shards)})
    needed, free = _missing_bytes(plan, folder), shutil.disk_usage(folder).free
    full = ResourceError(
        f"the disk is full: `{folder}` needs {needed / 1e6:,.0f} MB more, free: "
        f"{free / 1e6:,.0f} MB",
        hint=f"{FREE_SPACE}, or name a folder on another disk",
    )
    claims = hasattr(os, "posix_fallocate")  # macOS lacks it
    if not claims and needed > free:
        raise full
    for shard in plan.shards:
        with (folder / shard.file).open("a+b") as file:
            try:
                if claims:
                    os.posix_fallocate(file.fileno(), 0, shard.size)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise full from None
            file.truncate(shard.size)
        with (folder / shard.file).open("r+b", buffering=0) as file:
            write_at(file.fileno(), 0, memoryview(shard.header))


def _missing_bytes(plan: Plan, folder: Path) -> int:
    allocated = {path.name: path.stat().st_blocks * 512 for path in entries(folder)}
    return sum(max(0, shard.size - allocated.get(shard.file, 0)) for shard in plan.shards)


def passed_through(names: Iterable[str]) -> list[str]:
    """Those of a source folder's files that the result carries unchanged."""
    return sorted(
        name for name in names if not any(fnmatchcase(name, pattern) for pattern in NOT_PASSED)
    )


def small_files(source: Path) -> list[str]:
    """Names of the files that the result carries unchanged, each of which can be read now.

    Folders are left out.

    Raises:
        CheckpointError: a pipe, a device, a link out of the folder or to nothing, a file that may
            not be read, or a name that is not UTF-8.
    """
    names = []
    for name in passed_through(path.name for path in source.iterdir()):
        path = source / name
        if path.is_dir() and not any(fnmatchcase(name, pattern) for pattern in NEVER_FOLDERS):
            continue
        open_file(path).close()
        try:
            name.encode()
        except UnicodeEncodeError:
            raise CheckpointError(
                f"`{path}`: the name of the file is not valid UTF-8", hint="rename or remove it"
            ) from None
        names.append(name)
    return names


def check_small_files(source: Path) -> list[str]:
    """`small_files`, after a look into those that lowbit-run will read.

    Raises:
        CheckpointError: see `small_files`; also a tokenizer, settings or a template that cannot be
            read.
        FormatError: a kept_vocabulary.json that cannot be read.
    """
    names = small_files(source)
    for name in names:
        if name in READ_JSON:
            read_json(source / name, MAX_SETTINGS_BYTES)
        elif fnmatchcase(name, TEMPLATES):
            read_text(source / name)
    if TOKENIZER_FILE in names:
        try:
            load_text_tokenizer(source)
        except CheckpointError as error:
            raise CheckpointError(
                str(error),
                hint=f"repair {TOKENIZER_FILE}, or remove it to convert the weights alone",
            ) from None
    load_chat_template(source)
    read_kept_vocabulary(source)
    return names


def copies(source: Path) -> dict[str, str]:
    """Name in the result of every file of the source that the conversion does not replace.

    README.md, the card of the original, is copied as SOURCE_README.md.
    """
    return {name: name_of_copy(name) for name in small_files(source)}


def name_of_copy(name: str) -> str:
    """Name in the result of a file of the source that is passed through."""
    return SOURCE_README if name == README else name


def generated_files(plan: Plan) -> dict[str, bytes]:
    """Content of config.json, and of the index of several shards."""
    files = {CONFIG_FILE: json_bytes(plan.config)}
    if len(plan.shards) > 1:
        files[INDEX_FILE] = json_bytes(index_json(plan.shards))
    return files


def expected_files(plan: Plan, source: Path) -> dict[str, str]:
    """SHA-256 by name of all files of a result beside its weights and lowbit.json."""
    generated = generated_files(plan).items()
    return {name: hashlib.sha256(content).hexdigest() for name, content in generated} | {
        copy: hash_file(source / name) for name, copy in copies(source).items()
    }


def copy_file(source: Path, copy: Path) -> None:
    """Copy the content of a file of a model folder."""
    with open_file(source) as file, copy.open("wb") as written:
        shutil.copyfileobj(file, written)


def free_place(out: Path) -> Path:
    """The path that a new output folder will have; nothing may be there, not even one of ours."""
    output_dir = place_of(out)  # rename cannot target a link or `..`
    if output_dir.is_dir() and any(output_dir.iterdir()):
        raise ResourceError(f"`{out}` is not empty", hint="choose another folder")
    check_output(output_dir, overwrite=False)
    return output_dir


@contextmanager
def working_folder(
    output_dir: Path, digest: str, overwrite: bool, files: Collection[str], hint: str
) -> Iterator[tuple[Path, Journal]]:
    """The folder in which a result is built, made if need be, and its journal; see `open_journal`.

    `put_in_place` ends the work. Without it the folder stays, and the next run continues there.
    """
    partial = partial_of(output_dir)
    partial.mkdir(parents=True, exist_ok=True)
    with open_journal(partial, digest, overwrite, files, hint) as journal:
        yield partial, journal


def remove_stale(folder: Path, keep: Collection[str]) -> None:
    """Remove what an earlier run left in a working folder, calibrated layers aside."""
    for path in list(entries(folder)):
        if name_in(folder, path) not in keep and not path.name.startswith(CALIBRATED):
            path.unlink()
    for inner in row_folders(folder):
        inner.rmdir()


@contextmanager
def new_folder(output_dir: Path, work: str, files: Collection[str], hint: str) -> Iterator[Path]:
    """A folder to fill, empty but for its journal, that takes its place where the block ends.

    Args:
        work: names what is written; that of another kind is not thrown away.
        hint: what a user can do about work of another kind.
    """
    with working_folder(output_dir, work, False, files, hint) as (partial, _):
        remove_stale(partial, (JOURNAL_FILE,))
        yield partial
        put_in_place(output_dir, overwrite=False)


def put_in_place(out: Path, overwrite: bool) -> None:
    """Sync every file and rename the folder to its final name; journal and old result go last.

    Raises:
        ResourceError: something has come to lie at `out` since the start.
    """
    partial, old = partial_of(out), replaced_of(out)
    for path in [*entries(partial), *row_folders(partial)]:
        if path.name.startswith(CALIBRATED):
            path.unlink()
        else:
            sync(path)
    sync(partial)
    check_output(out, overwrite)
    if out.exists() and any(out.iterdir()):
        if old.exists():
            remove_owned(old)
        out.rename(old)
    partial.rename(out)
    finish(out)


def finish(out: Path) -> None:
    """Remove the journal of a result that is in its place, and the result that it replaces."""
    old, journal = replaced_of(out), out / JOURNAL_FILE
    if journal.exists():
        journal.unlink()
    sync(out)
    sync(out.parent)
    if old.exists():
        _check_owned(old)
        remove_owned(old)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
