"""`quality.html`: one file, nothing fetched, for whoever decides whether the model ships."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from lowbit.convert.quality.record import LogitQuality, QualityReport
from lowbit.convert.report import plots, verdict, words
from lowbit.convert.report.heat import heat_maps
from lowbit.convert.report.page import render_page, share
from lowbit.convert.report.space import Room
from lowbit.convert.report.terminal import size_text
from lowbit.formats.manifest import Manifest
from lowbit.formats.tasks import TaskReport

WORST = 10


def render_html(
    report: QualityReport,
    manifest: Manifest | None,
    name: str,
    rooms: Sequence[Room] = (),
    tasks: TaskReport | None = None,
) -> str:
    """The page.

    Args:
        report: what was measured.
        manifest: of the packed folder, None where it has none.
        name: of the model, for the title.
        rooms: where its bytes went.
        tasks: results of tasks, None where none were run.
    """
    logits = report.logits
    outputs = any(row.output_error is not None for row in report.weights)
    return render_page(
        "quality.html.jinja",
        name=name,
        report=report,
        logits=logits,
        verdict=verdict.judge(report),
        gauge=_gauge(report),
        guidance=verdict.guidance(report.weights),
        all_guidance=verdict.KL_GUIDANCE,
        observations=verdict.observations(report),
        in_words="" if logits is None else verdict.in_words(logits),
        noise_in_words="" if logits is None else verdict.noise_in_words(logits),
        change="" if logits is None else words.perplexity_change(logits),
        error="" if logits is None else words.perplexity_error(logits),
        scored="" if logits is None else words.scored(logits),
        kind_max=max((kind.kl_mean for kind in logits.kinds), default=0.0) if logits else 0.0,
        plots={} if logits is None else _plots(report, logits),
        outputs=outputs,
        maps=heat_maps(report.weights),
        kinds=verdict.kinds(report.weights),
        worst=verdict.worst(report.weights, WORST, by_output=outputs),
        schemes=sorted({verdict.scheme_text(row) for row in report.weights}),
        rooms=rooms,
        rooms_max=max((room.share for room in rooms), default=0.0),
        size_text=size_text(report),
        tasks=tasks,
        manifest=manifest,
        recipe=[] if manifest is None else recipe_facts(manifest.recipe),
        fates="" if manifest is None else _fates(manifest),
    )


@dataclass(frozen=True, slots=True)
class Gauge:
    """The mean KL on a logarithmic scale; places and widths in percent of it.

    Attributes:
        value: where this file is.
        side: to which side of that place its label goes.
        good: width up to the guidance.
        caution: width up to twice that.
        noise: where BF16 alone is; None where it was not measured.
        limit: the guidance, in words.
        double: twice that.
    """

    value: float
    side: str
    good: float
    caution: float
    noise: float | None
    limit: str
    double: str


def _gauge(report: QualityReport) -> Gauge | None:
    """None where there is nothing to measure against."""
    measure = verdict.guidance(report.weights)
    if measure is None or report.logits is None:
        return None
    _, limit = measure
    noise = None if report.logits.noise is None else report.logits.noise.kl_mean
    low = min(limit / 100, (noise or limit) / 2)
    high = limit * 10

    def place(value: float) -> float:
        return round(100 * share(math.log(max(value, low) / low), math.log(high / low)), 2)

    value = place(report.logits.kl_mean)
    return Gauge(
        value=value,
        side="from-left" if value < 20 else "from-right" if value > 80 else "",
        good=place(limit),
        caution=round(place(2 * limit) - place(limit), 2),
        noise=None if noise is None else place(noise),
        limit=f"{limit:g}",
        double=f"{2 * limit:g}",
    )


def _plots(report: QualityReport, logits: LogitQuality) -> dict[str, Markup | None]:
    measure = verdict.guidance(report.weights)
    positions = logits.positions
    return {
        "kl": plots.kl_distribution(logits, None if measure is None else measure[1]),
        "windows": plots.kl_along(logits),
        "perplexity": plots.perplexity_along(logits),
        "positions": plots.kl_by_position(positions, logits.kl_mean) if positions else None,
    }


def recipe_facts(recipe: Mapping[str, Any], within: str = "") -> list[tuple[str, str]]:
    """A recipe as names and values in words; what is not set is left out."""
    facts: list[tuple[str, str]] = []
    for key, value in recipe.items():
        if value is None or value is False or value in ([], {}, ""):
            continue
        name = f"{within}{key.replace('_', ' ')}"
        if isinstance(value, Mapping):
            facts += recipe_facts(value, f"{name}: ")
        else:
            facts.append((name[:1].upper() + name[1:], _fact(value)))
    return facts


def _fact(value: Any) -> str:
    if value is True:
        return "yes"
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _fates(manifest: Manifest) -> str:
    """How many source tensors were quantized, copied and dropped: `43 quantized, 24 copied`."""
    counts = Counter(tensor.fate for tensor in manifest.source_tensors)
    return ", ".join(f"{count} {fate}" for fate, count in counts.items()) or "none"
