"""Writing the reports beside the packed checkpoint."""

import hashlib
import os
import re
from pathlib import Path

from lowbit.convert.disk import disk_errors
from lowbit.convert.quality.record import QUALITY_FILE, QualityReport
from lowbit.convert.report.card import read_license, render_card
from lowbit.convert.report.html import render_html
from lowbit.formats.manifest import read_manifest

HTML_FILE = "quality.html"
README = "README.md"
DRAFT = "MODEL_CARD.md"

_MARK = re.compile(r"\n<!-- lowbit draft ([0-9a-f]{64}) -->\n$")


def write_reports(folder: Path, report: QualityReport) -> list[Path]:
    """Write quality.json, quality.html and a draft of the model card; the files, in that order.

    The card is README.md, unless there is one already that this function did not write or that
    somebody has edited since: then it is MODEL_CARD.md.

    Raises:
        FormatError: lowbit.json cannot be read.
        ResourceError: the disk is full.
    """
    manifest = read_manifest(folder)
    name = folder.resolve().name
    readme = folder / README
    license_id = None if _is_untouched_draft(readme) else read_license(readme)
    card = folder / (README if not readme.exists() or _is_untouched_draft(readme) else DRAFT)
    contents = {
        folder / QUALITY_FILE: report.to_bytes(),
        folder / HTML_FILE: render_html(report, manifest, name).encode(),
        card: _marked(render_card(report, manifest, name, license_id)),
    }
    for path, content in contents.items():
        _replace(path, content)
    return list(contents)


def _replace(path: Path, content: bytes) -> None:
    """Give a file its new content at once; a reader sees the old one or all of the new."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with disk_errors(), partial.open("wb") as file:
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


def _is_untouched_draft(path: Path) -> bool:
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    mark = _MARK.search(text)
    return mark is not None and hashlib.sha256(text[: mark.start()].encode()).hexdigest() == mark[1]
