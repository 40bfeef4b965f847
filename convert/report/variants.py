"""A team's file of variants: what was chosen among, on record, in one JSON file and one page.

Every comparison adds its folders. What was measured of the same conversion on the same text and
device before gives way to the new figures.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from lowbit.convert.measure.ranges import check_ranges
from lowbit.convert.report import formatting
from lowbit.convert.report.comparison import FolderComparison, FolderRow
from lowbit.convert.report.formatting import MISSING, number
from lowbit.convert.report.page import render_page
from lowbit.formats.errors import RequestError
from lowbit.formats.files.atomic import replace_files
from lowbit.formats.layout.records import finite, load_object, record
from lowbit.formats.tasks import TaskResult

SCHEMA = 2
SUFFIX = ".json"
PAGE = ".html"


@dataclass(frozen=True, slots=True)
class Variant:
    """One packed form of a model, as it was measured."""

    recorded_on: str  # date in UTC, `2026-05-31`
    original: str  # Hub id, or a description; the same for all variants of a comparison
    text_name: str  # that quality was measured on
    scored_tokens: int  # of it
    row: FolderRow  # its figures, without path and without the difference to other folders

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for measurements of which the later one replaces the earlier."""
        row = self.row
        device = "" if row.speed is None else row.speed.device
        return row.manifest_sha256 or row.name, self.original, self.text_name, device


def variants_of(found: FolderComparison, original: str) -> list[Variant]:
    """The folders of a comparison, as of today."""
    today = datetime.now(UTC).date().isoformat()
    rows = (replace(row, folder=row.name, difference=None) for row in found.rows)
    return [Variant(today, original, found.text_name, found.scored_tokens, row) for row in rows]


def read_variants(path: Path) -> list[Variant]:
    """The variants on record; empty where there is no file yet.

    Raises:
        CheckpointError: not a regular file.
        FormatError: malformed, of another schema, or with figures that cannot be.
    """
    hint = "name another file: this release's `lowbit-convert compare --record` did not write it"
    try:
        content = load_object(path, "schema", SCHEMA, hint)
    except FileNotFoundError:
        return []
    found = record(_Content, content, str(path))
    for number_, variant in enumerate(found.variants):
        check_ranges(variant, f"{path}: variants {number_}")
    return list(found.variants)


def added(before: Sequence[Variant], new: Sequence[Variant]) -> list[Variant]:
    """Variants on record, without those that are measured anew, then the new ones."""
    renewed = {variant.identity for variant in new}
    return [variant for variant in before if variant.identity not in renewed] + list(new)


def check_record(path: Path) -> None:
    """Refuse, before the long work, a file that the record cannot be kept in.

    Raises:
        LowbitError: another name than `*.json`, or a file that is no record.
    """
    if path.suffix.lower() != SUFFIX:
        raise RequestError(f"`{path}` does not end in {SUFFIX}")
    read_variants(path)


def write_variants(path: Path, variants: Sequence[Variant]) -> Path:
    """Write the record and, beside it, its page; returns the page's path.

    Raises:
        ResourceError: the place cannot be written to, or the disk is full.
    """
    page = path.with_suffix(PAGE)
    content = finite({"schema": SCHEMA, "variants": [asdict(variant) for variant in variants]})
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    replace_files({page: variants_page(variants).encode(), path: text.encode()})
    return page


def variants_page(variants: Sequence[Variant]) -> str:
    """The page as HTML: one table, the latest first."""
    return render_page(
        "variants.html.jinja",
        variants=list(reversed(variants)),
        originals=list(dict.fromkeys(variant.original for variant in variants)),
        score_text=score_text,
        speed_text=speed_text,
    )


def speed_text(row: FolderRow) -> str:
    """`812 tok/s on NVIDIA H200`; a dash where it was not measured."""
    if row.speed is None:
        return MISSING
    return f"{number(row.speed.decode_tokens_per_s, 1)} tok/s on {row.speed.device}"


def score_text(score: TaskResult) -> str:
    """`gsm8k exact_match 0.8123 ± 0.0110`."""
    return f"{score.task} {score.metric}{score.rounding} {formatting.score(score)}"


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of the file."""

    variants: tuple[Variant, ...]
