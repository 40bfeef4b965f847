"""`quality.html`, the report as one page without outside resources."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from markupsafe import Markup

from lowbit.convert.measure.record import LogitQuality, QualityReport
from lowbit.convert.measure.speed import Speed
from lowbit.convert.mtp.drafting import Draft, Drafting
from lowbit.convert.report import formatting, limits, linears, plots, warnings
from lowbit.convert.report.heat import heat_maps
from lowbit.convert.report.page import render_page, share
from lowbit.convert.report.space import SizeShare
from lowbit.convert.report.verdict import expected_loss, judge
from lowbit.formats.kept_vocabulary import KeptVocabulary
from lowbit.formats.layout.manifest import Manifest
from lowbit.formats.tasks import TaskReport

WORST = 10
SCALE = (1e-4, 3.0)  # ends of the gauge, nats
DEEPEST = 4  # levels of a recipe that are listed; deeper ones are shown as JSON


def render_html(
    report: QualityReport,
    manifest: Manifest | None,
    name: str,
    size_shares: Sequence[SizeShare] = (),
    tasks: TaskReport | None = None,
    speed: Speed | None = None,
    kept: KeptVocabulary | None = None,
) -> str:
    """The page as HTML, with the model's name and all that is known of it."""
    logits, verdict, expected = report.logits, judge(report), expected_loss(report)
    outputs = any(row.output_error is not None for row in report.weights)
    return render_page(
        "quality.html.jinja",
        name=name,
        report=report,
        logits=logits,
        verdict=verdict,
        gauge=None if logits is None or verdict.grade is None else _gauge(logits, expected),
        expected=expected,
        limits=limits,
        warnings=warnings.warnings_of(report),
        traded=warnings.tradeoff_note(report),
        **({} if logits is None else _about(logits, expected)),
        outputs=outputs,
        maps=heat_maps(report.weights),
        kinds=linears.kinds(report.weights),
        worst=linears.worst(report.weights, WORST, by_output=outputs),
        schemes=sorted({linears.scheme_text(row) for row in report.weights}),
        size_shares=size_shares,
        largest_share=max((part.share for part in size_shares), default=0.0),
        size_text=formatting.size_text(report),
        tasks=tasks,
        speed=speed,
        kept=kept,
        manifest=manifest,
        recipe=[] if manifest is None else recipe_facts(manifest.recipe),
        fates="" if manifest is None else _fates(manifest),
        rounded_head=warnings.rounded_head(report.weights),
    )


def _about(logits: LogitQuality, expected: limits.Expectation | None) -> dict[str, Any]:
    """Values of the template that come from measured logits."""
    kl_text = formatting.kl_with_error(logits.kl_mean, logits.kl_error)
    change = formatting.perplexity_change(logits)
    charts = {"kl": plots.kl_distribution(logits, None if expected is None else expected.kl)}
    if len(logits.window_series) > 1:  # one is a dot
        charts["windows"] = plots.kl_along(logits)
    if logits.positions:
        charts["positions"] = plots.kl_by_position(logits.positions, logits.kl_mean)
    return {
        "in_words": warnings.in_words(logits),
        "noise_in_words": warnings.noise_in_words(logits),
        "kl_text": kl_text,
        "kl_error": formatting.error_of(kl_text),
        "change": change,
        "error": formatting.error_of(change),
        "scored": formatting.scored(logits),
        "kind_max": max((kind.kl_mean for kind in logits.kinds), default=0.0),
        "plots": {name: Markup(svg) for name, svg in charts.items()},
        "drafts": () if logits.drafting is None else _drafts(logits.drafting),
    }


def _drafts(drafting: Drafting) -> list[tuple[str, Draft, Draft | None, Draft | None]]:
    """Drafts by their place in a round: packed, the original's, of the draft head's tokens."""
    count = len(drafting.packed)
    others = (drafting.original[:count], drafting.draft_head[:count])
    return list(zip_longest(formatting.ORDINALS[:count], drafting.packed, *others))


class Band(NamedTuple):
    """A grade's part of the scale: width and end in percent of it, and its limit in words."""

    grade: limits.Grade
    width: float
    end: float
    limit: str  # empty where there is none


class Gauge(NamedTuple):
    """The mean KL on a logarithmic scale; places are in percent of the scale."""

    value: float  # of this file
    side: str  # of that place on which the label stands
    bands: tuple[Band, ...]  # from the left
    noise: float | None  # KL that BF16 alone causes
    expected: float | None  # loss to expect of this size and these bits


def _gauge(logits: LogitQuality, expected: limits.Expectation | None) -> Gauge:
    noise = logits.noise
    low, high = SCALE

    def place(value: float) -> float:
        return round(100 * share(math.log(max(value, low) / low), math.log(high / low)), 2)

    ends = [place(limit.kl) for limit in limits.LIMITS] + [100.0]
    widths = [round(b - a, 2) for a, b in zip([0.0, *ends], ends, strict=False)]
    names = [f"{limit.kl:g}" for limit in limits.LIMITS] + [""]
    value = place(logits.kl_mean)
    return Gauge(
        value=value,
        side="from-left" if value < 20 else "from-right" if value > 80 else "",
        bands=tuple(map(Band, limits.GRADES, widths, ends, names)),
        noise=None if noise is None else place(noise.kl_mean),
        expected=None if expected is None else place(expected.kl),
    )


def recipe_facts(
    recipe: Mapping[str, Any], within: str = "", depth: int = 1
) -> list[tuple[str, str]]:
    """A recipe as names and values in words; what is not set is left out."""
    facts: list[tuple[str, str]] = []
    for key, value in recipe.items():
        if value is None or value is False or value in ([], {}, ""):
            continue
        name = f"{within}{key.replace('_', ' ')}"
        if isinstance(value, Mapping) and depth < DEEPEST:
            facts += recipe_facts(value, f"{name}: ", depth + 1)
        else:
            facts.append((name[:1].upper() + name[1:], _fact(value)))
    return facts


def _fact(value: Any) -> str:
    if value is True:
        return "yes"
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(map(str, value))
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:  # the recipe of a file; it was read with less stack in use
        return "nested too deeply to be shown"


def _fates(manifest: Manifest) -> str:
    """Counts of source tensors by fate: `43 quantized, 24 copied`."""
    counts = Counter(tensor.fate for tensor in manifest.source_tensors)
    return ", ".join(f"{count} {fate}" for fate, count in counts.items()) or "none"
