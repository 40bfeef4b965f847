"""A model's results on tasks, through lm-evaluation-harness (the `evaluate` extra).

The harness brings the questions, the metrics and the standard errors; this module lends it the
model. Importing it needs no harness.
"""

import contextlib
import difflib
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch

from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.machine.system import install_hint
from lowbit.formats.tasks import (
    SampleScores,
    TaskReport,
    TaskResult,
    TaskRun,
    TaskSettings,
    harness_missing,
    manifest_sha256,
)
from lowbit.runtime.engine.model import Model

SEEDS = 0, 1234, 1234  # the harness's own: Python's random, numpy and torch, few-shot examples


def _harness() -> str:
    """Name and version of the harness; ResourceError where a part of it is missing."""
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise harness_missing(str(error)) from None
    return f"lm-eval {version('lm_eval')}"


def evaluate(
    model: Model,
    settings: TaskSettings,
    manager: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    keep_scores: bool = False,
) -> TaskRun:
    """Let a model answer tasks; `manager` is the result of `find_tasks` for the same settings.

    Args:
        keep_scores: also return the scores of every sample.

    Raises:
        ResourceError: the harness is not installed.
        RequestError: an unknown or unsuitable task, or a question the model cannot be asked.
    """
    harness, chat = _harness(), settings.chat
    if chat and model.template is None:
        raise RequestError(f"`{model.folder}` has no chat template", hint="leave out --chat")
    from lm_eval.evaluator import evaluate as run

    from lowbit.runtime.evaluate.harness import LanguageModel

    with contextlib.redirect_stdout(sys.stderr):  # the harness prints now and then
        random.seed(SEEDS[0])
        numpy.random.seed(SEEDS[1])
        torch.manual_seed(SEEDS[1])
        loaded = _load_tasks(settings, manager)
        lm = LanguageModel(model, chat, settings.thinking, progress)
        started = time.perf_counter()
        results = run(
            lm=lm,
            task_dict=loaded,
            limit=settings.limit,
            log_samples=keep_scores,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
        )
    common = {
        "limit": settings.limit,
        "chat": chat,
        "context": model.context,
        "device": model.device,
        "kv_cache": model.kv_cache.cache_type.name,
        "activations": model.options.activations,
    }
    digest = manifest_sha256(model.folder)
    report = TaskReport(version("lowbit"), harness, digest, read_results(results, common))
    scores = read_scores(results, report.tasks) if keep_scores else ()
    return TaskRun(report, lm.truncated, time.perf_counter() - started, scores)


def read_results(results: dict[str, Any], common: dict[str, Any]) -> tuple[TaskResult, ...]:
    """Rows of the result of `lm_eval.evaluate`; `common` holds fields that all rows share."""
    rows = []
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            name, comma, applied = key.partition(",")
            if not comma or name.endswith("_stderr"):
                continue
            rows.append(
                TaskResult(
                    task=task,
                    metric=_metric(name, applied),
                    value=_finite(value),
                    stderr=_finite(metrics.get(f"{name}_stderr,{applied}")),
                    samples=int(metrics.get("sample_len", 0)),
                    higher_is_better=results["higher_is_better"].get(task, {}).get(name),
                    few_shot=results["n-shot"].get(task),
                    version=str(results["versions"].get(task, "")),
                    **common,
                )
            )
    return tuple(rows)


def read_scores(results: dict[str, Any], rows: Sequence[TaskResult]) -> tuple[SampleScores, ...]:
    """Scores of every sample, of the metrics that are a plain mean of them.

    Args:
        results: of `lm_eval.evaluate` with its samples.
        rows: of `read_results`.
    """
    values = {(row.task, row.metric): row.value for row in rows}
    scores = []
    for task, samples in results["samples"].items():
        for own in _scores_by_metric(task, samples):
            value = values.get((task, own.metric))
            total, count = math.fsum(own.totals), sum(own.counts)
            if value is None or not count:
                continue
            if math.isclose(total / count, value, rel_tol=1e-9, abs_tol=1e-12):
                scores.append(own)
    return tuple(scores)


def _scores_by_metric(task: str, samples: Sequence[dict[str, Any]]) -> list[SampleScores]:
    """Scores of a task's samples; of no metric that gave one of them no number."""
    found: dict[str, list[tuple[str, float, int] | None]] = {}
    for sample in samples:
        for name in sample["metrics"]:
            parts = _parts(sample[name])
            scored = None if parts is None else (sample["doc_hash"], *parts)
            found.setdefault(_metric(name, sample["filter"]), []).append(scored)
    scores = []
    for metric, scored_samples in found.items():
        known = [scored for scored in scored_samples if scored is not None]
        if len(known) == len(scored_samples):
            scores.append(SampleScores(task, metric, *map(tuple, zip(*known, strict=True))))
    return scores


def _metric(name: str, applied: str) -> str:
    """A metric's name with the filter of the harness, if one was applied."""
    return name if applied == "none" else f"{name} ({applied})"


def _parts(value: Any) -> tuple[float, int] | None:
    """Sum and number of a sample's scores; None where they are no finite numbers."""
    each = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int | float | numpy.number) for one in each):
        return None
    total = math.fsum(map(float, each))
    return (total, len(each)) if math.isfinite(total) else None


def _finite(value: Any) -> float | None:
    """A figure of the harness; None where it has a text or NaN."""
    try:
        figure = float(value)
    except (TypeError, ValueError):
        return None
    return figure if math.isfinite(figure) else None


def find_tasks(settings: TaskSettings) -> Any:
    """A task manager of the harness that knows the tasks, for `evaluate`.

    Raises:
        ResourceError: the harness is not installed.
        RequestError: an unknown task.
    """
    _harness()
    from lm_eval.tasks import TaskManager

    names = settings.names
    with contextlib.redirect_stdout(sys.stderr), contextlib.chdir(settings.task_folder or Path()):
        here = None if settings.task_folder is None else str(Path().resolve())
        if here is not None:
            # The harness's own 14,000 tasks take seconds to list.
            local = TaskManager(include_path=here, include_defaults=False)
            if set(names) <= set(local.all_subtasks):
                return local
        manager = TaskManager(include_path=here)
    known = manager.all_tasks
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else None
            raise RequestError(f"there is no task `{name}`", hint=hint)
    return manager


def _load_tasks(settings: TaskSettings, manager: Any) -> Any:
    """Tasks as the harness loads them.

    Raises:
        RequestError: one is broken or of another kind.
        ResourceError: a package that one needs is not installed.
    """
    from datasets.exceptions import DatasetsError

    manager = manager or find_tasks(settings)
    named = ", ".join(f"`{name}`" for name in settings.names)
    try:
        with contextlib.chdir(settings.task_folder or Path()):
            loaded = manager.load(list(settings.names))
    except ModuleNotFoundError as error:
        raise ResourceError(
            f"{named} cannot be loaded: `{error.name}` is not installed",
            hint=f"{install_hint('evaluate')}, or what the task's README asks for",
        ) from None
    except (DatasetsError, KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{named} cannot be loaded: {error}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise RequestError(f"`{name}` runs what the model writes, or shows it pictures")
        _set_examples(task, settings.few_shot)
    return loaded


def _set_examples(task: Any, few_shot: int | None) -> None:
    """Give a task's questions so many examples; None for as many as the task says."""
    stated = task.get_config("num_fewshot")
    if few_shot is not None and stated != 0:  # a task that says 0 means it
        task.set_config("num_fewshot", few_shot)
    elif stated is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(SEEDS[2])
