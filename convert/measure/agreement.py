"""A report measured again: which of its figures agree with what is recorded.

Both rest on the same windows of the same texts, so what differs is arithmetic alone: another
device, another release of a library. A figure agrees if it moved by no more than the error that the
report itself states for it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowbit.convert.measure.record import (
    ImageQuality,
    Int8Inputs,
    LogitQuality,
    QualityReport,
    TextKind,
    read_quality_file,
)
from lowbit.convert.texts.evaluation import Text
from lowbit.formats.errors import RequestError

SHARE = 0.01  # of a figure for which a report states no error
LEAST_KL = 1e-6  # nats; a model that was only rotated stays below it

Compared = LogitQuality | TextKind | Int8Inputs | ImageQuality


@dataclass(frozen=True, slots=True)
class Agreement:
    """A figure of a report, recorded and measured again."""

    figure: str  # what it is: `KL of maths`
    recorded: float  # in the report; may be infinite
    measured: float | None  # None where it was not measured again
    allowed: float  # most that they may differ by

    @property
    def agrees(self) -> bool:
        """True if they differ by no more than is allowed."""
        if self.measured is None or not math.isfinite(self.measured + self.recorded):
            return self.measured == self.recorded
        return abs(self.measured - self.recorded) <= self.allowed


def read_claim(path: Path, digest: str | None, texts: Sequence[Text]) -> QualityReport:
    """Read a report that is to be measured again.

    Args:
        path: of a quality.json, or the folder that holds it.
        digest: SHA-256 of the packed folder's lowbit.json; None where it has none.
        texts: that will be measured.

    Raises:
        RequestError: no report is there, or it is about another folder or other texts.
        FormatError: of `read_quality`.
    """
    claim = read_quality_file(path)
    if claim.manifest_sha256 != digest:
        raise RequestError(
            f"`{path}` is about another conversion: it states the SHA-256 "
            f"`{claim.manifest_sha256}` of lowbit.json, and that of the folder is `{digest}`",
            hint="check the folder that it was published with",
        )
    if claim.logits is None:
        raise RequestError(
            f"`{path}` compares no logits, so there is little to check",
            hint="`lowbit-convert verify` checks the folder's bytes",
        )
    kinds = claim.logits.kinds
    stated = {row.sha256: row.name for row in kinds} or {
        claim.logits.text_sha256: claim.logits.text_name
    }
    if list(stated) != [text.sha256 for text in texts]:
        names = ", ".join(f"`{name}`" for name in stated.values())
        given = ", ".join(f"`{text.name}`" for text in texts)
        raise RequestError(
            f"`{path}` was measured on {names}, not on {given}, by the SHA-256 of the texts",
            hint="name its texts, in its order, by --eval-text",
        )
    return claim


def agreements(claim: QualityReport, again: QualityReport) -> tuple[Agreement, ...]:
    """Compare the figures of two reports on the same folder and texts."""
    size = claim.sizes.bits_per_weight
    rows = [
        Agreement("bits per weight", size, again.sizes.bits_per_weight, SHARE * size),
        _weights(claim, again),
    ]
    if claim.logits is not None and again.logits is not None:
        rows += _logits(claim.logits, again.logits)
    return tuple(rows)


def _weights(claim: QualityReport, again: QualityReport) -> Agreement:
    """The linear whose relative error moved most; not measured where linears are others."""
    found = {row.name: row.relative_l2 for row in again.weights}
    if [row.name for row in claim.weights] != list(found):
        return Agreement("linears", len(claim.weights), None, 0.0)
    if not claim.weights:
        return Agreement("linears", 0, 0, 0.0)
    moved = max(claim.weights, key=lambda row: _distance(row.relative_l2, found[row.name]))
    figure = f"error of {moved.name}"
    return Agreement(figure, moved.relative_l2, found[moved.name], SHARE * moved.relative_l2)


def _distance(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b)


def _logits(claim: LogitQuality, again: LogitQuality) -> Iterator[Agreement]:
    own = claim.log_ratio_error or SHARE
    for figure, field, share in (
        ("perplexity, original", "perplexity_original", SHARE),
        ("perplexity, packed", "perplexity_packed", own),
    ):
        recorded = getattr(claim, field)
        yield Agreement(figure, recorded, getattr(again, field), share * recorded)
    yield _kl("KL", claim, again)
    top1 = claim.top1_agreement
    spread = max(math.sqrt(top1 * (1 - top1) / claim.scored_tokens), 1 / claim.scored_tokens)
    yield Agreement("top-1", top1, again.top1_agreement, spread)
    kinds = {row.name: row for row in again.kinds}
    for row in claim.kinds[1:]:
        yield _kl(f"KL of {row.name}", row, kinds.get(row.name))
    rounded = {row.name: row for row in again.int8_inputs}
    for one in claim.int8_inputs if rounded else ():
        yield _kl(f"KL of {one.name}, int8 inputs", one, rounded.get(one.name))
    if claim.images is not None:
        seen = again.images
        if seen is not None and seen.sha256 != claim.images.sha256:
            seen = None  # another release has other pictures
        yield _kl("KL of images", claim.images, seen)


def _kl(figure: str, claim: Compared, again: Compared | None) -> Agreement:
    allowed = max(claim.kl_error or SHARE * claim.kl_mean, LEAST_KL)
    return Agreement(figure, claim.kl_mean, None if again is None else again.kl_mean, allowed)
