"""A team's file of variants: what was chosen among, on record, in one JSON file and one page.

Every comparison adds its folders. What was measured of the same conversion on the same text and
device before gives way to the new figures.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from lowbit.convert.measure.ranges import check_ranges
from lowbit.convert.measure.speed import Speed
from lowbit.convert.report.comparison import FolderComparison, FolderRow
from lowbit.convert.report.formatting import MISSING, number
from lowbit.convert.report.page import render_page
from lowbit.formats.errors import RequestError
from lowbit.formats.files.atomic import replace_files
from lowbit.formats.layout.records import finite, load_object, record

SCHEMA = 1
SUFFIX = ".json"
PAGE = ".html"


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one task."""

    task: str
    metric: str
    value: float | None
    stderr: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class Variant:
    """One packed form of a model, as it was measured.

    Attributes:
        recorded_on: date in UTC, `2026-05-31`.
        name: of the folder.
        original: Hub id, or a description; the same for all variants of a comparison.
        text_name: that quality was measured on.
        scored_tokens: of it.
        manifest_sha256: of lowbit.json's bytes; None where another tool made the folder.
        grade: of the verdict; None where nothing is judged.
        title: of the verdict.
        kl_mean: nats per token.
        kl_error: its standard error; None where the windows are too few.
        top1_agreement: share of tokens where both rank the same token first.
        bits_per_weight: of the weight files.
        folder_bytes: all its files, reports aside.
        method: `gptq`, or `another tool`.
        schemes: of the linears.
        command: that makes the folder again; None where lowbit.json does not say.
        speed: None where it was not measured.
        scores: on tasks; empty where there are none.
    """

    recorded_on: str
    name: str
    original: str
    text_name: str
    scored_tokens: int
    manifest_sha256: str | None
    grade: str | None
    title: str
    kl_mean: float
    kl_error: float | None
    top1_agreement: float
    bits_per_weight: float
    folder_bytes: int
    method: str
    schemes: str
    command: str | None
    speed: Speed | None
    scores: tuple[Score, ...]

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for measurements of which the later one replaces the earlier."""
        device = "" if self.speed is None else self.speed.device
        return self.manifest_sha256 or self.name, self.original, self.text_name, device


def variants_of(found: FolderComparison, original: str) -> list[Variant]:
    """The folders of a comparison, as of today."""
    today = datetime.now(UTC).date().isoformat()
    return [_variant(row, found, original, today) for row in found.rows]


def _variant(row: FolderRow, found: FolderComparison, original: str, today: str) -> Variant:
    scores = (Score(t.task, t.metric, t.value, t.stderr, t.samples) for t in row.tasks)
    return Variant(
        recorded_on=today,
        name=row.name,
        original=original,
        text_name=found.text_name,
        scored_tokens=found.scored_tokens,
        manifest_sha256=row.manifest_sha256,
        grade=row.verdict.grade,
        title=row.verdict.title,
        kl_mean=row.kl_mean,
        kl_error=row.kl_error,
        top1_agreement=row.top1_agreement,
        bits_per_weight=row.bits_per_weight,
        folder_bytes=row.folder_bytes,
        method=row.method,
        schemes=row.schemes,
        command=row.command,
        speed=row.speed,
        scores=tuple(scores),
    )


def read_variants(path: Path) -> list[Variant]:
    """The variants on record; empty where there is no file yet.

    Raises:
        CheckpointError: not a regular file.
        FormatError: malformed, of another schema, or with figures that cannot be.
    """
    hint = "it is no record that lowbit-convert compare has written; name another file"
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


def speed_text(variant: Variant) -> str:
    """`812 tok/s on NVIDIA H200`; a dash where it was not measured."""
    speed = variant.speed
    if speed is None:
        return MISSING
    return f"{number(speed.decode_tokens_per_s, 1)} tok/s on {speed.device}"


def score_text(score: Score) -> str:
    """`gsm8k exact_match 0.8123 ± 0.0110`."""
    if score.value is None:
        return f"{score.task} {score.metric} {MISSING}"
    error = "" if score.stderr is None else f" ± {number(score.stderr, 4)}"
    return f"{score.task} {score.metric} {number(score.value, 4)}{error}"


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of the file."""

    variants: tuple[Variant, ...]
