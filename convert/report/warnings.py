"""Warnings about a report, and its figures in sentences."""

import math
from collections.abc import Sequence
from statistics import median

from lowbit.convert.measure.coverage import few_tokens
from lowbit.convert.measure.measure import FLIP_CHARACTERS
from lowbit.convert.measure.record import LogitQuality, QualityReport
from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.original.evaluation_text import bundled_hashes
from lowbit.convert.report.formatting import kl, percent
from lowbit.convert.report.linears import worst
from lowbit.convert.report.verdict import used_options
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
    found = [_outliers(rows) for rows in _by_bits(report.weights)]
    clipped = [row for row in report.weights if row.clipped_share > MUCH_CLIPPING]
    if clipped:
        row = max(clipped, key=lambda row: row.clipped_share)
        others = f" and {len(clipped) - 1} more" if len(clipped) > 1 else ""
        found.append(
            f"{row.name}{others}: {percent(row.clipped_share)} of the weights are clipped, "
            f"more than the scale search does on ordinary weights."
        )
    found += [_overfitting(report.held_out_excess), few_tokens(report.coverage) or ""]
    if report.logits is not None:
        found += [_lower_perplexity(report.logits), _quoted(report.logits)]
    return [sentence for sentence in found if sentence]


def rounded_head(rows: Sequence[WeightQuality]) -> str:
    """Sentence on how a calibration treats multi-token prediction; empty where none is packed."""
    own = [row.name for row in rows if row.name.startswith(MTP_PREFIX)]
    if not own:
        return ""
    experts = ", its experts included" if any(".experts." in name for name in own) else ""
    return (
        f"rounded to nearest with searched scales{experts}: no calibration text passes through it"
    )


def _overfitting(excess: float | None) -> str:
    if excess is None or excess < OVERFIT:
        return ""
    return (
        f"Calibrated on too little text: the error on held-out windows is {excess:.0%} above that "
        f"on the windows it learned from; give more --calib-samples or a longer --calib text."
    )


def traded(report: QualityReport) -> str:
    """Why weight errors are larger than those of rounding; empty where nothing was traded."""
    used = used_options(report.command) or {}
    if not report.weights or not used.get("--method", "").startswith("gptq"):
        return ""
    return (
        "Weight errors are larger than those of round-to-nearest: gptq trades them for smaller "
        "errors in what each linear computes. Judge the file by its predictions."
    )


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
        f"{first.name}{others}: relative error {percent(first.relative_l2)}, more than "
        f"{OUTLIER:g} times the median of the {first.bits}-bit linears "
        f"({percent(middle)}); more bits there may pay."
    )


def _lower_perplexity(logits: LogitQuality) -> str:
    if logits.perplexity_change >= 0:
        return ""
    return (
        "Perplexity is lower than the original's on this text. That makes no better model: "
        "the KL divergence says how far it moved."
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
