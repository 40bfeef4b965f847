"""Writing the reports beside the packed checkpoint."""

import hashlib
import os
import re
from pathlib import Path

from lowbit.convert.disk import disk_errors
from lowbit.convert.folder import README, SOURCE_README
from lowbit.convert.quality.record import QUALITY_FILE, QualityReport
from lowbit.convert.report.card import render_card
from lowbit.convert.report.html import render_html
from lowbit.convert.report.source_card import SourceCard, read_source_card
from lowbit.convert.report.space import where_bytes_went
from lowbit.formats.packed import open_packed
from lowbit.formats.tasks import read_tasks

HTML_FILE = "quality.html"
DRAFT = "MODEL_CARD.md"

_MARK = re.compile(r"\n<!-- lowbit draft ([0-9a-f]{64}) -->\n$")


def write_reports(folder: Path, report: QualityReport) -> list[Path]:
    """Write quality.json, quality.html and a draft of the model card; the files, in that order.

    The card is README.md, unless there is one already that this function did not write or that
    somebody has edited since: then it is MODEL_CARD.md.

    Raises:
        LowbitError: the folder is no packed checkpoint, or the disk is full.
    """
    packed = open_packed(folder)
    name = folder.resolve().name
    readme = folder / README
    ours = not readme.exists() or is_untouched_draft(readme)
    tasks = read_tasks(folder)
    if tasks is not None and not tasks.is_current(folder):
        tasks = None
    rooms = where_bytes_went(packed, report.sizes.folder_bytes)
    contents = {
        folder / QUALITY_FILE: report.to_bytes(),
        folder / HTML_FILE: render_html(report, packed.manifest, name, rooms, tasks).encode(),
        folder / (README if ours else DRAFT): _marked(
            render_card(packed, report, tasks, source_card(folder), name)
        ),
    }
    for path, content in contents.items():
        replace_file(path, content)
    return list(contents)


def source_card(folder: Path) -> SourceCard:
    """What the card of the original says, which a conversion passes through beside its own."""
    original = folder / SOURCE_README
    if not original.exists() and not is_untouched_draft(folder / README):
        original = folder / README
    return read_source_card(original)


def replace_file(path: Path, content: bytes) -> None:
    """Give a file its new content at once; a reader sees the old one or all of the new.

    Raises:
        ResourceError: the disk is full, or the place cannot be written to.
    """
    partial = path.with_name(f".{path.name}.partial")
    with disk_errors():
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)


def _marked(card: str) -> bytes:
    """The card with its own hash in a comment, which tells a later edit."""
    digest = hashlib.sha256(card.encode()).hexdigest()
    return f"{card}\n<!-- lowbit draft {digest} -->\n".encode()


def is_untouched_draft(path: Path) -> bool:
    """Whether a card is one that `write_reports` wrote and nobody has edited since."""
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    mark = _MARK.search(text)
    return mark is not None and hashlib.sha256(text[: mark.start()].encode()).hexdigest() == mark[1]
