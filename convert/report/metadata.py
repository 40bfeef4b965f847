"""Front matter of a model card: the metadata that the Hub reads, measured figures included."""

import math
import re
from typing import TYPE_CHECKING, Any

import yaml

from lowbit.convert.measure.record import LogitQuality, QualityReport, TextKind
from lowbit.convert.report.source_card import SourceCard
from lowbit.formats.layout.manifest import Manifest
from lowbit.formats.printable import printable
from lowbit.formats.tasks import TaskReport

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TEXT_GENERATION = "text-generation"
SEEING = "image-text-to-text"  # pipeline of a model with a vision tower
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

    `bits` are those of most of the packed weights, `text_only` models lack a vision tower.
    """
    from huggingface_hub import ModelCardData

    base = source.base_model or (None if manifest is None else manifest.source.repo)
    pipeline = TEXT_GENERATION if text_only else source.pipeline_tag or SEEING
    results = [*_predictions(report), *_tasks(tasks)]
    card = ModelCardData(
        base_model=base,
        base_model_relation=None if base is None else "quantized",
        license=source.license or UNKNOWN,
        license_name=source.license_name,
        license_link=source.license_link,
        language=list(source.languages) or None,
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=["compressed-tensors", "lowbit", *([] if bits is None else [f"int{bits}"])],
        model_name=name if results else None,
        eval_results=results or None,
    )
    found = _one_line(card.to_dict())  # type: ignore[no-untyped-call]
    text: str = yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=1000)
    return text


def _predictions(report: QualityReport | None) -> list["EvalResult"]:
    """Perplexity and divergence on every text, those of the first text first."""
    if report is None or report.logits is None:
        return []
    logits = report.logits
    rows: list[tuple[str, LogitQuality | TextKind]] = [(logits.text_name, logits)]
    rows += [(kind.name, kind) for kind in logits.kinds if kind.sha256 != logits.text_sha256]
    return [
        _result(name, *metric)
        for name, row in rows
        for metric in (
            ("perplexity", "Perplexity", row.perplexity_packed),
            ("kl_divergence", "Mean KL divergence to the original, nats per token", row.kl_mean),
            ("top1_agreement", "Share of equal first choices", row.top1_agreement),
        )
        if math.isfinite(metric[2])
    ]


def _tasks(tasks: TaskReport | None) -> list["EvalResult"]:
    return [
        _result(row.task, row.metric, row.metric, row.value)
        for row in (() if tasks is None else tasks.tasks)
        if row.value is not None and math.isfinite(row.value)
    ]


def _result(dataset: str, kind: str, name: str, value: float) -> "EvalResult":
    from huggingface_hub import EvalResult

    return EvalResult(
        task_type=TEXT_GENERATION,
        task_name="Text generation",
        dataset_type=_slug(dataset),
        dataset_name=dataset,
        metric_type=kind,
        metric_name=name,
        metric_value=round(value, DIGITS),
    )


def _one_line(value: Any) -> Any:
    """The value with every text on one line, so that none of its lines is a `---`."""
    if isinstance(value, dict):
        return {key: _one_line(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_one_line(inner) for inner in value]
    return printable(value) if isinstance(value, str) else value


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "text"
