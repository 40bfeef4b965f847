"""What the figures mean: against guidance, by kind of linear, and what deserves a look."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from lowbit.convert.quality.record import LogitQuality, QualityReport
from lowbit.convert.quality.weights import WeightQuality
from lowbit.convert.report import words
from lowbit.formats.scheme import Scheme

# Mean KL per token that published files of these bits reach. Readers do not forgive fewer bits:
# below 4 they are the measure too.
KL_GUIDANCE = {4: 0.03, 8: 0.003}
LEAST_BITS = 4
OUTLIER = 1.5  # times the median error of the same bits
MUCH_CLIPPING = 0.05
FEW_TOKENS = 10_000

Level = Literal["good", "caution", "bad", "unknown"]

_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the file may ship.

    Attributes:
        level: for colours.
        answer: to the question, in a word or two.
        title: the level's name.
        reason: in one sentence, without capital and full stop.
    """

    level: Level
    answer: str
    title: str
    reason: str


@dataclass(frozen=True, slots=True)
class Kind:
    """All layers' linears of one kind and scheme.

    Attributes:
        name: last part of the module name, `q_proj`.
        scheme: short form, `INT4 g128`.
        rows: one a layer.
    """

    name: str
    scheme: str
    rows: tuple[WeightQuality, ...]

    @property
    def mean_error(self) -> float:
        """Mean relative error."""
        return fmean(row.relative_l2 for row in self.rows)

    @property
    def worst(self) -> WeightQuality:
        """The linear with the largest relative error."""
        return max(self.rows, key=lambda row: row.relative_l2)

    @property
    def mean_sqnr_db(self) -> float:
        """Mean signal-to-noise ratio in decibels."""
        return fmean(row.sqnr_db for row in self.rows)

    @property
    def mean_output_error(self) -> float | None:
        """Mean relative error of the outputs; None where it was not measured."""
        found = [row.output_error for row in self.rows if row.output_error is not None]
        return fmean(found) if found else None

    @property
    def clipped_share(self) -> float:
        """Share of clipped weights over all its linears."""
        clipped = sum(row.clipped_share * row.weights for row in self.rows)
        return clipped / sum(row.weights for row in self.rows)

    @property
    def min_cosine(self) -> float:
        """The smallest weight cosine."""
        return min(row.cosine for row in self.rows)


def scheme_text(row: WeightQuality) -> str:
    """`INT4 g128`."""
    return str(Scheme(row.bits, row.group_size))


def layer_of(name: str) -> tuple[int | None, str]:
    """Number of the decoder's layer, None outside of them, and the kind of linear."""
    if name.startswith("mtp."):  # its layers are no layers of the decoder
        return None, f"mtp.{name.rpartition('.')[2]}"
    match = _LAYER.match(name)
    return (None, name) if match is None else (int(match[1]), match[2].rpartition(".")[2])


def kinds(rows: Sequence[WeightQuality]) -> list[Kind]:
    """Linears grouped by kind and scheme, in the order of the file."""
    groups: dict[tuple[str, str], list[WeightQuality]] = {}
    for row in rows:
        groups.setdefault((layer_of(row.name)[1], scheme_text(row)), []).append(row)
    return [Kind(name, scheme, tuple(group)) for (name, scheme), group in groups.items()]


def worst(
    rows: Sequence[WeightQuality], count: int, by_output: bool = False
) -> list[WeightQuality]:
    """The linears with the largest error of their weights, or of their outputs; largest first."""

    def error(row: WeightQuality) -> float:
        return (row.output_error or 0.0) if by_output else row.relative_l2

    return sorted(rows, key=lambda row: -error(row))[:count]


def main_bits(rows: Sequence[WeightQuality]) -> int | None:
    """Bits of most of the packed weights; None where nothing is packed."""
    weights: dict[int, int] = {}
    for row in rows:
        weights[row.bits] = weights.get(row.bits, 0) + row.weights
    return max(weights, key=lambda bits: weights[bits]) if weights else None


def guidance(rows: Sequence[WeightQuality]) -> tuple[int, float] | None:
    """The bits whose published files are the measure, and their mean KL; None where none are."""
    bits = main_bits(rows)
    if bits is None or max(bits, LEAST_BITS) not in KL_GUIDANCE:
        return None
    return max(bits, LEAST_BITS), KL_GUIDANCE[max(bits, LEAST_BITS)]


def judge(report: QualityReport) -> Verdict:
    """The verdict: mean KL against what published files of the same bits reach."""
    if report.logits is None:
        return Verdict("unknown", "Not known yet", "Not judged", "the logits were not measured")
    measure = guidance(report.weights)
    if measure is None:
        bits = main_bits(report.weights)
        what = "this file" if bits is None else f"{bits}-bit weights"
        return Verdict(
            "unknown", "For you to judge", "Not judged", f"there is no guidance for {what}"
        )
    bits, limit = measure
    found = f"mean KL {words.kl(report.logits.kl_mean)} nats per token"
    aim = f"good {bits}-bit files stay below {limit:g}"
    if report.logits.kl_mean <= limit:
        return Verdict("good", "Yes", "Within guidance", f"{found} ({aim})")
    if report.logits.kl_mean <= 2 * limit:
        return Verdict("caution", "With care", "Above guidance", f"{found}, while {aim}")
    return Verdict("bad", "No", "Far above guidance", f"{found}, while {aim}")


def in_words(logits: LogitQuality) -> str:
    """What the packed model does to predictions, as a sentence."""
    change = logits.perplexity_change
    direction = "rises" if change >= 0 else "falls"
    return (
        f"It ranks the same token first as the original in {words.percent(logits.top1_agreement)} "
        f"of predictions, and perplexity {direction} by {words.change(abs(change))}."
    )


def noise_in_words(logits: LogitQuality) -> str:
    """How the loss compares with BF16's own; empty where that was not measured."""
    noise = logits.noise
    if noise is None:
        return ""
    text = (
        f"BF16 arithmetic alone moves the original by {words.kl(noise.kl_mean)} and changes "
        f"{words.percent(1 - noise.top1_agreement)} of its top tokens"
    )
    if noise.kl_mean <= 0 or logits.kl_mean < 2 * noise.kl_mean:
        return f"{text}."
    return f"{text}; packing moves it {logits.kl_mean / noise.kl_mean:,.0f} times as far."


def observations(report: QualityReport) -> list[str]:
    """What deserves a look before the file ships, as sentences; empty where nothing does."""
    found = [_outliers(rows) for rows in _by_bits(report.weights)]
    clipped = [row for row in report.weights if row.clipped_share > MUCH_CLIPPING]
    if clipped:
        row = max(clipped, key=lambda row: row.clipped_share)
        others = f" and {len(clipped) - 1} more" if len(clipped) > 1 else ""
        found.append(
            f"{row.name}{others}: {words.percent(row.clipped_share)} of the weights are clipped, "
            f"more than the scale search does on ordinary weights."
        )
    if report.logits is not None:
        found += _about_logits(report.logits)
    return [sentence for sentence in found if sentence]


def _by_bits(rows: Sequence[WeightQuality]) -> list[list[WeightQuality]]:
    bits = sorted({row.bits for row in rows})
    return [[row for row in rows if row.bits == wanted] for wanted in bits]


def _outliers(rows: Sequence[WeightQuality]) -> str:
    middle = median(row.relative_l2 for row in rows)
    beyond = [row for row in worst(rows, len(rows)) if row.relative_l2 > OUTLIER * middle]
    if not beyond:
        return ""
    first = beyond[0]
    others = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
    return (
        f"{first.name}{others}: relative error {words.percent(first.relative_l2)}, more than "
        f"{OUTLIER:g} times the median of the {first.bits}-bit linears "
        f"({words.percent(middle)}); more bits there may pay."
    )


def _about_logits(logits: LogitQuality) -> list[str]:
    found = []
    if logits.scored_tokens < FEW_TOKENS:
        found.append(
            f"Only {logits.scored_tokens:,} tokens were scored: the p99 of the KL rests on "
            f"{max(1, logits.scored_tokens // 100):,} of them. A longer text says more."
        )
    if logits.perplexity_change < 0:
        found.append(
            "Perplexity is lower than the original's on this text. That makes no better model: "
            "the KL divergence says how far it moved."
        )
    return found
