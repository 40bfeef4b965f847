"""The front matter of a model card, which the Hub reads.

Keys as in its documentation: model cards, and `model-index` for measured figures.
"""

import math
import re
from typing import Any

import yaml

from lowbit.convert.measure.record import QualityReport
from lowbit.convert.report.source_card import SourceCard
from lowbit.formats.layout.manifest import Manifest
from lowbit.formats.printable import printable
from lowbit.formats.tasks import TaskReport

TASK = {"type": "text-generation", "name": "Text generation"}
SEEING = "image-text-to-text"  # what the Hub lists a model with a vision tower under
UNKNOWN = "unknown"  # the Hub's identifier of a license that nobody states
DIGITS = 6


def front_matter(
    name: str,
    manifest: Manifest | None,
    bits: int | None,
    source: SourceCard,
    text_only: bool,
    report: QualityReport | None,
    tasks: TaskReport | None,
) -> str:
    """The metadata as YAML, without the lines around it.

    Args:
        name: of the model.
        manifest: names the base model, where it came from the Hub.
        bits: of most of the packed weights.
        source: facts stated about the original.
        text_only: the packed model lacks a vision tower.
        report: measured quality.
        tasks: results of tasks.
    """
    base = source.base_model or (None if manifest is None else manifest.source.repo)
    pipeline = TASK["type"] if text_only else source.pipeline_tag or SEEING
    results = [*_predictions(report), *_tasks(tasks)]
    found: dict[str, Any] = {
        "base_model": base,
        "base_model_relation": None if base is None else "quantized",
        "license": source.license or UNKNOWN,
        "license_name": source.license_name,
        "license_link": source.license_link,
        "language": list(source.languages),
        "library_name": "transformers",
        "pipeline_tag": pipeline,
        "tags": ["compressed-tensors", "lowbit", *([] if bits is None else [f"int{bits}"])],
        "model-index": [{"name": name, "results": results}] if results else None,
    }
    kept = {key: _one_line(value) for key, value in found.items() if value not in (None, [])}
    text: str = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=1000)
    return text


def _predictions(report: QualityReport | None) -> list[dict[str, Any]]:
    """Perplexity and divergence on every text, the first one's first."""
    if report is None or report.logits is None:
        return []
    logits = report.logits
    figures = {
        logits.text_name: (logits.perplexity_packed, logits.kl_mean, logits.top1_agreement),
        **{
            kind.name: (kind.perplexity_packed, kind.kl_mean, kind.top1_agreement)
            for kind in logits.kinds
            if kind.sha256 != logits.text_sha256
        },
    }
    return [
        _result(
            name,
            [
                ("perplexity", "Perplexity", perplexity),
                ("kl_divergence", "Mean KL divergence to the original, nats per token", kl),
                ("top1_agreement", "Share of equal first choices", top1),
            ],
        )
        for name, (perplexity, kl, top1) in figures.items()
    ]


def _tasks(tasks: TaskReport | None) -> list[dict[str, Any]]:
    rows = () if tasks is None else tasks.tasks
    return [
        _result(row.task, [(row.metric, row.metric, row.value)])
        for row in rows
        if row.value is not None
    ]


def _result(name: str, metrics: list[tuple[str, str, float]]) -> dict[str, Any]:
    return {
        "task": dict(TASK),
        "dataset": {"type": _slug(name), "name": name},
        "metrics": [
            {"type": kind, "name": words, "value": round(value, DIGITS)}
            for kind, words, value in metrics
            if math.isfinite(value)
        ],
    }


def _one_line(value: Any) -> Any:
    """Put every text on a line of its own, so that none looks like a `---`."""
    if isinstance(value, dict):
        return {key: _one_line(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_one_line(inner) for inner in value]
    return printable(value) if isinstance(value, str) else value


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "text"
