"""`quality.html`: one file, nothing fetched, for whoever decides whether the model ships."""

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from lowbit.convert.quality.record import QualityReport
from lowbit.convert.report import plots, words
from lowbit.convert.report.terminal import size_text
from lowbit.convert.report.verdict import (
    KL_GUIDANCE,
    in_words,
    judge,
    kinds,
    main_bits,
    observations,
    scheme_text,
    worst,
)
from lowbit.formats.manifest import Manifest

TEMPLATE = "quality.html.jinja"
WORST = 12


def render_html(report: QualityReport, manifest: Manifest | None, name: str) -> str:
    """The page.

    Args:
        report: what was measured.
        manifest: of the packed folder, None where it has none.
        name: of the model, for the title.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        percent=words.percent,
        kl=words.kl,
        cosine=words.cosine,
        decibels=words.decibels,
        size=words.size,
        scheme=scheme_text,
    )
    template = environment.from_string(Path(__file__).with_name(TEMPLATE).read_text("utf-8"))
    return template.render(
        name=name,
        report=report,
        logits=report.logits,
        verdict=judge(report),
        in_words="" if report.logits is None else in_words(report.logits),
        observations=observations(report),
        change="" if report.logits is None else words.perplexity_change(report.logits),
        scored="" if report.logits is None else words.scored(report.logits),
        size_text=size_text(report),
        kinds=kinds(report.weights),
        worst=worst(report.weights, WORST),
        schemes=sorted({scheme_text(row) for row in report.weights}),
        guidance=KL_GUIDANCE,
        manifest=manifest,
        fates=_fates(manifest),
        plots=_plots(report),
    )


def _plots(report: QualityReport) -> dict[str, str]:
    """Data addresses of the plots, by name."""
    found: dict[str, bytes] = {}
    if report.weights:
        found["errors"] = plots.errors_by_layer(report.weights)
    if report.logits is not None:
        guidance = KL_GUIDANCE.get(main_bits(report.weights) or 0)
        found["kl"] = plots.kl_distribution(report.logits, guidance)
        found["windows"] = plots.windows(report.logits)
    return {
        name: "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
        for name, svg in found.items()
    }


def _fates(manifest: Manifest | None) -> dict[str, Any]:
    """How many source tensors were quantized, copied and dropped."""
    counts: dict[str, Any] = {}
    for tensor in () if manifest is None else manifest.source_tensors:
        counts[tensor.fate] = counts.get(tensor.fate, 0) + 1
    return counts
