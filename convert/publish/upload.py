"""The files of a packed folder that are published, with the hash of each."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from lowbit.convert.measure.record import QualityReport, read_quality
from lowbit.convert.pipeline.origin import recall
from lowbit.convert.pipeline.owned import is_untouched_draft
from lowbit.convert.pipeline.verification import check_recorded
from lowbit.convert.report.card import render_card
from lowbit.convert.report.files import source_card
from lowbit.formats.errors import FormatError, PublishError
from lowbit.formats.file_names import DRAFT, HTML_FILE, QUALITY_FILE, README
from lowbit.formats.files.reading import MAX_TEXT_BYTES, check_regular, open_file, read_bytes
from lowbit.formats.layout.manifest import MANIFEST_FILE, Manifest
from lowbit.formats.packed import PackedCheckpoint
from lowbit.formats.row_folders import entries, name_in
from lowbit.formats.safetensors.hashing import CHUNK_BYTES, hash_file
from lowbit.formats.tasks import TASKS_FILE, TaskReport, read_tasks
from lowbit.formats.text.tokenizer import TOKENIZER_FILE

WEIGHTS = "*.safetensors"
VOCABULARIES = (TOKENIZER_FILE, "vocab.json", "merges.txt")  # `/root` is an ordinary token there


@dataclass(frozen=True, slots=True)
class Item:
    """A file to publish."""

    name: str  # path in the repository
    content: Path | bytes  # the bytes, or the file that holds them
    size: int  # in bytes
    sha256: str  # of the content

    @property
    def is_weight(self) -> bool:
        """True for a weight file, which is sent before everything else."""
        return fnmatch(self.name, WEIGHTS)

    def read(self) -> bytes:
        """The content as bytes."""
        return self.content if isinstance(self.content, bytes) else read_bytes(self.content)

    def git_id(self) -> str:
        """Git's blob id of the content."""
        digest = hashlib.sha1(b"blob %d\0" % self.size)
        if isinstance(self.content, bytes):
            digest.update(self.content)
        else:
            with open_file(self.content) as file:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Statement:
    """Facts about the original that the user states for the card."""

    base_model: str | None = None  # Hub id of the original; None where it is left to lowbit.json
    # Its identifier on the Hub; None where it is left to the original's card.
    license: str | None = None


NOTHING = Statement()


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """A verified folder, ready to be sent."""

    folder: Path  # the packed checkpoint
    repo: str  # `owner/name`
    items: tuple[Item, ...]  # every file, weights first
    # Files of the folder that lowbit.json does not name; they are not published.
    left_out: tuple[str, ...]
    notes: tuple[str, ...] = ()  # sentences for the publisher to read before the content is public
    local_paths: tuple[str, ...] = ()  # notes on files that name a folder of this machine

    @property
    def size_bytes(self) -> int:
        """Sum of all items."""
        return sum(item.size for item in self.items)

    @property
    def card(self) -> str:
        """Text of README.md."""
        item = next(item for item in self.items if item.name == README)
        return item.read().decode(errors="replace")


def plan_upload(
    packed: PackedCheckpoint,
    repo: str,
    progress: Callable[[str, int, int], None],
    stated: Statement = NOTHING,
) -> UploadPlan:
    """Verify a packed folder and list the files to publish.

    Published are the files that lowbit.json names, lowbit.json, the reports and the card. A card
    that nobody edited is written anew, so that its commands name the repository.

    Args:
        progress: called with ("verify", bytes done, bytes in all).
        stated: facts for a card that nobody edited.

    Raises:
        FormatError: the folder has no lowbit.json, differs from it, or holds a report about
            something else.
        CheckpointError: a damaged or missing file.
        PublishError: an edited card, which `stated` would change.
    """
    folder, manifest = packed.checkpoint.folder, packed.manifest
    if manifest is None:
        raise FormatError(
            f"`{folder}` has no {MANIFEST_FILE}: nothing says which bytes are right",
            hint="only what lowbit-convert made is published; `hf upload` sends any folder",
        )
    report, tasks = _reports(packed)
    names = [*(file.name for file in manifest.files), MANIFEST_FILE]
    names += [name for name in (QUALITY_FILE, HTML_FILE, TASKS_FILE) if (folder / name).is_file()]
    own = _card(packed, manifest, names, stated, repo, (report, tasks))
    if own is None and README not in names:
        names.append(README)
    check_recorded(packed, manifest, progress)
    items = [_item(folder / name, name, manifest) for name in names]
    local_paths = _local_paths(items, manifest)
    notes: list[str] = []
    if own is not None:
        content, notes = own
        items.append(Item(README, content, len(content), hashlib.sha256(content).hexdigest()))
    known = {item.name for item in items} | {DRAFT}
    return UploadPlan(
        folder=folder,
        repo=repo,
        items=tuple(sorted(items, key=lambda item: (not item.is_weight, item.name))),
        left_out=tuple(sorted({name_in(folder, path) for path in entries(folder)} - known)),
        notes=(*notes, *local_paths),
        local_paths=tuple(local_paths),
    )


def _card(
    packed: PackedCheckpoint,
    manifest: Manifest,
    names: Sequence[str],
    stated: Statement,
    repo: str,
    results: tuple[QualityReport | None, TaskReport | None],
) -> tuple[bytes, list[str]] | None:
    """A card for the repository, and notes on it; None where an edited README.md is published."""
    folder = packed.checkpoint.folder
    readme = folder / README
    if README in names or (readme.exists() and not is_untouched_draft(readme)):
        if stated != NOTHING:
            raise PublishError(
                f"`{readme}` was edited and is published as it is",
                hint="state base model and license in it, without --base-model and --license",
            )
        return None
    said = source_card(folder).stating(stated.base_model, stated.license)
    name = repo.rpartition("/")[2]
    notes = []
    if said.base_model is None and manifest.source.repo is None:
        notes.append("the card names no base model; --base-model OWNER/NAME would")
    if said.license is None:
        notes.append("the card says that the license is unknown; --license ID would state it")
    return render_card(packed, *results, said, name, repo).encode(), notes


def _local_paths(items: Iterable[Item], manifest: Manifest) -> list[str]:
    """Notes on files of the original that name a folder of this machine."""
    places = list(recall(manifest.source))
    with suppress(RuntimeError):
        places.append(Path.home())
    wanted = [os.fsencode(path) for path in places if len(path.parts) > 1]
    notes = []
    for item in items:
        if item.is_weight or item.size > MAX_TEXT_BYTES or item.name in VOCABULARIES:
            continue
        content = item.read()
        found = next((place for place in wanted if _names(content, place)), None)
        if found is not None:
            notes.append(f"`{item.name}` names a folder of this machine: {os.fsdecode(found)}")
    return notes


def _names(content: bytes, place: bytes) -> bool:
    """Tell if a file names a path, and not merely a longer path that begins with it."""
    return re.search(re.escape(place) + rb"(?![\w.-])", content) is not None


def _reports(packed: PackedCheckpoint) -> tuple[QualityReport | None, TaskReport | None]:
    """Quality and task results, if they are about these weights."""
    folder = packed.checkpoint.folder
    report, tasks = read_quality(folder), read_tasks(folder)
    for name, found in (
        (QUALITY_FILE, None if report is None else report.manifest_sha256),
        (TASKS_FILE, None if tasks is None else tasks.manifest_sha256),
    ):
        if (folder / name).is_file() and found != packed.manifest_sha256:
            raise FormatError(
                f"`{name}` in `{folder}` is about another conversion",
                hint="measure again with `lowbit-convert report` or `lowbit-run evaluate`, "
                "or remove the file",
            )
    return report, tasks


def _item(path: Path, name: str, manifest: Manifest) -> Item:
    """A file as an item; a hash that was just verified is not computed again.

    Raises:
        CheckpointError: not a file of the folder, but a link out of it for instance.
    """
    check_regular(path)
    listed = {file.name: file.sha256 for file in manifest.files}
    sha256 = listed.get(name) or hash_file(path)
    return Item(name, path, path.stat().st_size, sha256)
