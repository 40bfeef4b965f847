"""The verdict of `quality.json`, with the loss and whether it is that of this conversion."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.formats.errors import FormatError
from lowbit.formats.file_names import QUALITY_FILE
from lowbit.formats.layout.records import broken_seal, load_object, take_seal
from lowbit.formats.tasks import manifest_sha256

SCHEMA = 4  # of quality.json
VERDICT = "verdict"  # key of the judgement beside the figures that it comes from
REPORT_AGAIN = "make the report again with `lowbit-convert report`"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, without its reasons."""

    grade: str | None  # `close`, `usable`, `degraded` or `broken`; None where nothing is judged
    title: str  # the grade in words
    # mean KL divergence to the original, nats; None where it was not measured, or is infinite
    kl_mean: float | None
    bits_per_weight: float  # of the weight files
    measured_on: str | None  # date in UTC, `2026-05-31`; None where it is not known
    current: bool  # the folder still holds the conversion that was measured


def read_judgement(folder: Path) -> Judgement | None:
    """The judgement on a packed folder; None where there is no report.

    Raises:
        CheckpointError: not a regular file, or a link out of the folder or to nothing.
        FormatError: malformed, of a schema this release does not know, or changed since.
    """
    path = folder / QUALITY_FILE
    try:
        content = load_object(path, "schema", SCHEMA, REPORT_AGAIN)
    except FileNotFoundError:
        return None
    intact = take_seal(content)
    verdict = _get(content, VERDICT, dict, path) or {}
    measured = _get(content, "manifest_sha256", str, path)
    logits = _get(content, "logits", dict, path)
    bits = _get(_get(content, "sizes", dict, path) or {}, "bits_per_weight", float, path)
    title = _get(verdict, "title", str, path)
    if title is None or bits is None:
        raise FormatError(f"`{path}` has no title of a verdict, or no size", hint=REPORT_AGAIN)
    if not intact:
        raise broken_seal(path, REPORT_AGAIN)
    return Judgement(
        grade=_get(verdict, "grade", str, path),
        title=title,
        kl_mean=None if logits is None else _get(logits, "kl_mean", float, path),
        bits_per_weight=bits,
        measured_on=_get(content, "measured_on", str, path),
        current=measured == manifest_sha256(folder),
    )


def _get(content: dict[str, Any], name: str, kind: type, path: Path) -> Any:
    """A value of an object, of a kind or None."""
    value = content.get(name)
    if kind is float and type(value) is int:
        value = float(value)
    if value is None or type(value) is kind:
        return value
    raise FormatError(f"`{path}`: `{name}` is no {kind.__name__}", hint=REPORT_AGAIN)
