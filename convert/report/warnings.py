"""Warnings about a report, and its figures in sentences."""

import math
from collections.abc import Iterator, Sequence
from statistics import median

from lowbit.convert.measure.coverage import few_tokens
from lowbit.convert.measure.measure import FLIP_CHARACTERS
from lowbit.convert.measure.record import LogitQuality, QualityReport
from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.report.formatting import kl, percent
from lowbit.convert.report.linears import worst
from lowbit.convert.report.verdict import MOST_BITS
from lowbit.convert.texts.evaluation import bundled_hashes
from lowbit.formats.architectures.names import MTP_PREFIX

OUTLIER = 1.5  # times the median error of the same bits
MUCH_CLIPPING = 0.05
OVERFIT = 0.25  # share by which the held-out error may be above the learned one


def in_words(logits: LogitQuality) -> str:
    """The effect on predictions, as a sentence."""
    change = logits.perplexity_change
    direction = "rises" if change >= 0 else "falls"
    return (
        f"It ranks the same token first as the original in {percent(logits.top1_agreement)} "
        f"of predictions, and perplexity {direction} by {percent(abs(change))}."
    )


def noise_in_words(logits: LogitQuality) -> str:
    """The loss beside BF16's own, as a sentence; empty where that was not measured."""
    noise = logits.noise
    if noise is None:
        return ""
    text = (
        f"BF16 arithmetic alone moves the original by {kl(noise.kl_mean)} and changes "
        f"{percent(1 - noise.top1_agreement)} of its top tokens"
    )
    comparable = noise.kl_mean > 0 and math.isfinite(logits.kl_mean)
    if not comparable or logits.kl_mean < 2 * noise.kl_mean:
        return f"{text}."
    return f"{text}; packing moves it {logits.kl_mean / noise.kl_mean:,.0f} times as far."


def warnings_of(report: QualityReport) -> list[str]:
    """Warnings to look at before the file ships; empty where there are none."""
    return list(_warnings(report))


def _warnings(report: QualityReport) -> Iterator[str]:
    rows, excess, logits = report.weights, report.held_out_excess, report.logits
    for bits in sorted({row.bits for row in rows}):
        alike = [row for row in rows if row.bits == bits]
        middle = median(row.relative_l2 for row in alike)
        beyond = [row for row in worst(alike, len(alike)) if row.relative_l2 > OUTLIER * middle]
        if beyond:
            cure = "more bits" if bits < MOST_BITS else "smaller groups, or weights as stored"
            yield (
                f"{_first(beyond)}: relative error {percent(beyond[0].relative_l2)}, more than "
                f"{OUTLIER:g} times the median of the {bits}-bit linears ({percent(middle)}); "
                f"{cure} there may pay."
            )
    clipped = [row for row in rows if row.clipped_share > MUCH_CLIPPING]
    if clipped:
        clipped.sort(key=lambda row: -row.clipped_share)
        yield (
            f"{_first(clipped)}: {percent(clipped[0].clipped_share)} of the weights are clipped, "
            f"more than the scale search does on ordinary weights."
        )
    if excess is not None and excess >= OVERFIT:
        yield (
            f"Calibrated on too little text: the error on held-out windows is {excess:.0%} above "
            f"that on the windows it learned from; give more --calib-samples or a longer --calib "
            f"text."
        )
    if sentence := few_tokens(report.coverage):
        yield sentence
    if logits is not None and logits.perplexity_change < 0:
        yield (
            "Perplexity is lower than the original's on this text. That makes no better model: "
            "the KL divergence says how far it moved."
        )
    if logits is not None and (sentence := _quoted(logits)):
        yield sentence


def _first(rows: Sequence[WeightQuality]) -> str:
    return f"{rows[0].name} and {len(rows) - 1} more" if len(rows) > 1 else rows[0].name


def rounded_head(rows: Sequence[WeightQuality]) -> str:
    """Sentence on how a calibration treats multi-token prediction; empty where none is packed."""
    own = [row.name for row in rows if row.name.startswith(MTP_PREFIX)]
    if not own:
        return ""
    experts = ", its experts included" if any(".experts." in name for name in own) else ""
    return (
        f"rounded to nearest with searched scales{experts}: no calibration text passes through it"
    )


def tradeoff_note(report: QualityReport) -> str:
    """Reason why weight errors are larger than those of rounding; empty where they are not."""
    if not report.weights or report.recipe is None or not report.recipe.method.startswith("gptq"):
        return ""
    return (
        "Weight errors are larger than those of round-to-nearest: gptq trades them for smaller "
        "errors in what each linear computes. Judge the file by its predictions."
    )


def _quoted(logits: LogitQuality) -> str:
    """A sentence where the report quotes texts of the user's own, which may be private."""
    hashes = {kind.name: kind.sha256 for kind in logits.kinds}
    bundled = bundled_hashes()
    own = [
        flip.kind
        for flip in logits.flips
        if hashes.get(flip.kind, logits.text_sha256) not in bundled
    ]
    if not own:
        return ""
    passages = "a passage" if len(own) == 1 else f"{len(own)} passages"
    return (
        f"quality.json and quality.html quote {passages} of {', '.join(dict.fromkeys(own))}, of up "
        f"to {FLIP_CHARACTERS} characters each. Where that text is private, measure on another "
        f"before you publish them."
    )
