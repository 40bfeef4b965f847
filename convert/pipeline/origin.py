"""Finding the original of a packed folder again, and making sure that it is the original.

lowbit.json is published, so it names a local original by hashes alone. Where such an original and
copies of it lie is kept in the user's state folder; nothing found there, or beside the packed
folder, is trusted before its hashes are those of lowbit.json.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lowbit.convert.original.progress import Meter, Progress
from lowbit.formats.errors import CheckpointError, FormatError, LowbitError, ResourceError
from lowbit.formats.files.atomic import replace_files
from lowbit.formats.files.reading import check_regular, read_bytes
from lowbit.formats.files.user_folders import user_folder
from lowbit.formats.hub.locate import locate
from lowbit.formats.layout.manifest import MANIFEST_FILE, Manifest, Source
from lowbit.formats.machine.cores import core_count
from lowbit.formats.safetensors.checkpoint import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    Checkpoint,
    TensorInfo,
    open_checkpoint,
)
from lowbit.formats.safetensors.hashing import hash_file, hash_tensor

TOKENIZER_FILE = "tokenizer.json"
MOST_FOLDERS = 8  # of an original that are remembered
MAX_NOTE_BYTES = 100_000
NAME_IT = "name it with --source, a folder or a Hub id"
NAME_ANOTHER = "this is another model; name the folder or Hub id that was converted"

Ask = Callable[[str], str]  # a question for the user -> the answer


@dataclass(frozen=True, slots=True)
class Origin:
    """Checkpoints that may be the original, opened; at least one."""

    candidates: tuple[Checkpoint, ...]  # the likeliest first
    manifest: Manifest | None  # of the packed folder, None where it has none to check them by
    guessed: bool = False  # True where they were found, and not named by anybody
    repo: str | None = None  # Hub id of the original, where it has been fetched
    hint: str = NAME_IT  # what to do where none of them is the original

    def confirmed(self, progress: Progress) -> Checkpoint:
        """The first candidate whose tensors have the hashes of lowbit.json.

        It is remembered, so that nobody is asked for it twice.

        Raises:
            FormatError: no candidate is the original, naming what differs in the first.
            CheckpointError: the first cannot be read any more.
        """
        if self.manifest is None:
            return self.candidates[0]
        refused: list[FormatError | CheckpointError] = []
        for source in self.candidates:
            try:
                check_origin(self.manifest, source, progress)
            except (FormatError, CheckpointError) as error:
                refused.append(error)
            else:
                if self.manifest.source.repo is None:
                    remember(self.manifest.source, source.folder)
                return source
        more = f" (and {len(refused) - 1} more like it)" if len(refused) > 1 else ""
        raise type(refused[0])(f"{refused[0]}{more}", hint=refused[0].hint or self.hint)

    def settled(self, progress: Progress) -> "Origin":
        """The original alone, which is not hashed again; arguments and errors of `confirmed`."""
        return replace(self, candidates=(self.confirmed(progress),), manifest=None)


def find_origin(
    folder: Path, manifest: Manifest | None, given: str | None, ask: Ask | None
) -> Origin:
    """Find, and open, what may be the original of a packed folder.

    The user's word comes first, then the Hub id in lowbit.json, then the remembered folders and
    those beside the packed one, and at last the user's answer to a question.

    Args:
        ask: puts a question to the user; None where nobody is there to answer.

    Raises:
        CheckpointError: the original is not known, or cannot be fetched or read.
        FormatError: config.json is that of another model.
    """
    if given is not None:
        return _located(given, None, manifest, NAME_ANOTHER)
    if manifest is not None and manifest.source.repo is not None:
        return _located(manifest.source.repo, manifest.source.commit, manifest)
    known = () if manifest is None else recall(manifest.source)
    if manifest is not None:
        candidates = tuple(_look_around(folder, manifest, known))
        if candidates:
            return Origin(candidates, manifest, guessed=True)
    if ask is not None:
        answer = ask(f"Where is the original of {folder}? A folder or a Hub id").strip()
        return _located(answer, None, manifest, NAME_ANOTHER)
    folders = " or ".join(f"`{folder}`" for folder in known)
    lost = f"; it was {folders}, which is not there any more, or changed" if known else ""
    raise CheckpointError(f"`{folder}` does not say where its original is{lost}", hint=NAME_IT)


def _located(
    source: str, revision: str | None, manifest: Manifest | None, hint: str = NAME_IT
) -> Origin:
    location = locate(source, revision)
    try:
        opened = open_origin(manifest, location.folder)
    except FormatError as error:
        raise FormatError(str(error), hint=hint) from None
    return Origin((opened,), manifest, repo=location.repo, hint=hint)


def _look_around(folder: Path, manifest: Manifest, known: Sequence[Path]) -> Iterator[Checkpoint]:
    """The remembered folders and those beside the packed one, if config and headers fit."""
    here = folder.resolve()
    beside: Sequence[Path] = ()
    with suppress(OSError):
        beside = sorted(here.parent.iterdir())
    tried = {here}
    for path in (*known, *beside):
        with suppress(LowbitError, OSError, RuntimeError):  # the last of a loop of links
            if path.resolve() not in tried and (path / CONFIG_FILE).exists():
                tried.add(path.resolve())
                source = open_origin(manifest, path)
                _check_headers(manifest, source)
                yield source


def open_origin(manifest: Manifest | None, folder: Path) -> Checkpoint:
    """Open a folder, any without a manifest, whose config.json is the original's.

    Raises:
        CheckpointError: the folder cannot be read.
        FormatError: it is another model's.
    """
    if manifest is not None:
        _check_config(manifest, folder)
    return open_checkpoint(folder)


def _check_config(manifest: Manifest, folder: Path) -> None:
    try:
        config = read_bytes(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"`{folder}` is not a checkpoint: it has no {CONFIG_FILE}") from None
    if hashlib.sha256(config).hexdigest() != manifest.source.config_sha256:
        raise FormatError(
            f"`{CONFIG_FILE}` in `{folder}` is not that of the original", hint=NAME_ANOTHER
        )


def check_origin(manifest: Manifest, source: Checkpoint, progress: Progress) -> int:
    """Make sure that a checkpoint is the original; the number of its tensors.

    Raises:
        CheckpointError: a file that cannot be read.
        FormatError: naming the first file or tensor that is not the original's.
    """
    folder = source.folder
    _check_config(manifest, folder)
    tensors = _check_headers(manifest, source)
    meter = Meter(progress, "source", sum(info.nbytes for info in tensors))

    def digest(info: TensorInfo) -> str:
        actual = hash_tensor(folder / info.file, info)
        meter.add(info.nbytes)
        return actual

    with ThreadPoolExecutor(core_count()) as pool:
        try:
            for row, actual in zip(manifest.source_tensors, pool.map(digest, tensors), strict=True):
                if actual != row.sha256:
                    raise FormatError(
                        f"`{row.name}` in `{folder}` has other bytes than the original that was "
                        "converted"
                    )
        finally:
            pool.shutdown(cancel_futures=True)
    return len(tensors)


def _check_headers(manifest: Manifest, source: Checkpoint) -> list[TensorInfo]:
    """The tensors in the order of lowbit.json, if all but their bytes is the original's."""
    folder, tensors = source.folder, source.tensors
    extra = tensors.keys() - {row.name for row in manifest.source_tensors}
    if extra:
        raise FormatError(f"`{min(extra)}` in `{folder}` is not in {MANIFEST_FILE}")
    for row in manifest.source_tensors:
        info = tensors.get(row.name)
        if info is None:
            raise FormatError(f"`{row.name}` is not in `{folder}`: this is not the original")
        if (info.dtype_name, info.shape) != (row.dtype, row.shape):
            raise FormatError(
                f"`{row.name}` in `{folder}` is {info.dtype_name} {list(info.shape)}, the "
                f"original {row.dtype} {list(row.shape)}"
            )
    for file in manifest.files:
        if file.name == TOKENIZER_FILE and (folder / file.name).exists():
            check_regular(folder / file.name)
            if hash_file(folder / file.name) != file.sha256:
                raise FormatError(f"`{file.name}` in `{folder}` is not that of the original")
    return [tensors[row.name] for row in manifest.source_tensors]


def remember(source: Source, folder: Path) -> None:
    """Note for later commands of this user where an original lies, beside its other places.

    A copy may be gone by then. A state folder that cannot be written to only means that somebody is
    asked later.
    """
    with suppress(OSError, RuntimeError, ResourceError):
        note, here = _note_of(source), folder.resolve()
        folders = [here, *(folder for folder in recall(source) if folder != here)][:MOST_FOLDERS]
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_files({note: b"".join(os.fsencode(folder) + b"\0" for folder in folders)})


def recall(source: Source) -> tuple[Path, ...]:
    """The folders that `remember` noted, the latest first; they may hold anything by now."""
    with suppress(OSError, RuntimeError, CheckpointError):
        raw = read_bytes(_note_of(source), max_bytes=MAX_NOTE_BYTES)
        *whole, rest = raw.split(b"\0")  # each place ends with one
        folders = (Path(os.fsdecode(part)) for part in whole if not rest)
        return tuple(folder for folder in folders if folder.is_absolute())[:MOST_FOLDERS]
    return ()


def _note_of(source: Source) -> Path:
    name = hashlib.sha256(f"{source.config_sha256} {source.weights_sha256}".encode()).hexdigest()
    return user_folder("XDG_STATE_HOME", ".local/state") / "originals" / name[:32]
