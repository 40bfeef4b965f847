"""What of a packed folder is published, with the hash of each file."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from lowbit.convert.folder import README
from lowbit.convert.quality.record import QUALITY_FILE, QualityReport, read_quality
from lowbit.convert.report.card import render_card
from lowbit.convert.report.files import DRAFT, HTML_FILE, is_untouched_draft, source_card
from lowbit.convert.verification import verify_folder
from lowbit.formats.errors import FormatError
from lowbit.formats.hashing import hash_file
from lowbit.formats.manifest import MANIFEST_FILE, Manifest
from lowbit.formats.packed import open_packed
from lowbit.formats.tasks import TASKS_FILE, TaskReport, read_tasks

WEIGHTS = "*.safetensors"


@dataclass(frozen=True, slots=True)
class Item:
    """A file to publish.

    Attributes:
        name: in the repository.
        content: the bytes, or the file that holds them.
        size: in bytes.
        sha256: of the content.
    """

    name: str
    content: Path | bytes
    size: int
    sha256: str

    @property
    def is_weight(self) -> bool:
        """Whether it is sent before everything else."""
        return fnmatch(self.name, WEIGHTS)

    def git_id(self) -> str:
        """The id under which git keeps the content."""
        content = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True, slots=True)
class Parcel:
    """A verified folder, ready to be sent.

    Attributes:
        folder: the packed checkpoint.
        repo: `owner/name`.
        items: every file, weights first.
        left_out: files of the folder that are not published, since nothing names them.
    """

    folder: Path
    repo: str
    items: tuple[Item, ...]
    left_out: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Of all items."""
        return sum(item.size for item in self.items)


def make_parcel(folder: Path, repo: str, progress: Callable[[str, int, int], None]) -> Parcel:
    """Verify a packed folder and list what of it is published.

    That is every file of lowbit.json, itself, the reports and the card; a card that nobody edited
    is written anew with commands that name the repository.

    Args:
        folder: made by lowbit-convert.
        repo: `owner/name`.
        progress: called with ("verify", bytes done, bytes in all).

    Raises:
        FormatError: the folder has no lowbit.json, differs from it, or holds a report about
            something else.
        CheckpointError: a damaged or missing file.
    """
    packed = open_packed(folder)
    manifest = packed.manifest
    if manifest is None:
        raise FormatError(
            f"`{folder}` has no {MANIFEST_FILE}: nothing says which bytes are right",
            hint="only what lowbit-convert made is published; `hf upload` sends any folder",
        )
    report, tasks = _reports(folder)
    verify_folder(folder, None, progress)
    names = [*(file.name for file in manifest.files), MANIFEST_FILE]
    names += [name for name in (QUALITY_FILE, HTML_FILE, TASKS_FILE) if (folder / name).is_file()]
    items = [_item(folder / name, name, manifest) for name in names]
    readme = folder / README
    if README not in names:
        if readme.exists() and not is_untouched_draft(readme):
            items.append(_item(readme, README, manifest))
        else:
            name = repo.rpartition("/")[2]
            card = render_card(packed, report, tasks, source_card(folder), name, repo).encode()
            items.append(Item(README, card, len(card), hashlib.sha256(card).hexdigest()))
    known = {item.name for item in items} | {DRAFT}
    return Parcel(
        folder=folder,
        repo=repo,
        items=tuple(sorted(items, key=lambda item: (not item.is_weight, item.name))),
        left_out=tuple(sorted(path.name for path in folder.iterdir() if path.name not in known)),
    )


def _reports(folder: Path) -> tuple[QualityReport | None, TaskReport | None]:
    """Quality and task results, if they are about these weights."""
    report, tasks = read_quality(folder), read_tasks(folder)
    current = hash_file(folder / MANIFEST_FILE)
    for name, found in (
        (QUALITY_FILE, None if report is None else report.manifest_sha256),
        (TASKS_FILE, None if tasks is None else tasks.manifest_sha256),
    ):
        if (folder / name).is_file() and found != current:
            raise FormatError(
                f"`{name}` in `{folder}` is about another conversion",
                hint="measure again with `lowbit-convert report` or `lowbit-run evaluate`, "
                "or remove the file",
            )
    return report, tasks


def _item(path: Path, name: str, manifest: Manifest) -> Item:
    """A file; hashes that were just verified are not computed again."""
    listed = {file.name: file.sha256 for file in manifest.files}
    sha256 = listed.get(name) or hash_file(path)
    return Item(name, path, path.stat().st_size, sha256)
