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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.tasks import TaskReport, TaskResult, manifest_sha256
from lowbit.runtime.engine.model import Model
from lowbit.runtime.evaluate.harness import Progress, language_model

HINT = "pip install '.[evaluate]' in the clone of lowbit"
SEEDS = 0, 1234, 1234  # the harness's own: Python's random, numpy and torch, few-shot examples


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What came of an evaluation.

    Attributes:
        report: a row a metric.
        truncated: questions that lost their beginning because they did not fit the context.
        seconds: for questions and answers.
    """

    report: TaskReport
    truncated: int
    seconds: float


def check_harness() -> str:
    """Name and version of the harness.

    Raises:
        ResourceError: it is not installed, or a part of it is not.
    """
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise ResourceError(f"lm-evaluation-harness is missing: {error}", hint=HINT) from None
    return f"lm-eval {version('lm_eval')}"


def find_tasks(names: Sequence[str], folder: Path | None) -> Any:
    """The harness's task manager, made sure to know some tasks, for `evaluate`.

    Args:
        names: tasks, groups or tags.
        folder: of further tasks as YAML.

    Raises:
        ResourceError: the harness is not installed.
        RequestError: an unknown task.
    """
    check_harness()
    with contextlib.redirect_stdout(sys.stderr), contextlib.chdir(folder or Path()):
        return _find_tasks(names, folder)


def evaluate(
    model: Model,
    names: Sequence[str],
    *,
    manager: Any = None,
    task_folder: Path | None = None,
    limit: int | None = None,
    few_shot: int | None = None,
    chat: bool = False,
    thinking: bool | None = None,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Let a model answer tasks.

    Args:
        model: loaded.
        names: tasks, groups or tags that the harness or the folder has.
        manager: what `find_tasks` gave for the same names and folder; None to find them now.
        task_folder: of further tasks as YAML; paths in them are relative to it.
        limit: of samples a task.
        few_shot: examples before each question; None leaves it to the tasks.
        chat: put questions through the chat template.
        thinking: switches a reasoning model's thinking; None leaves it to the template.
        progress: called after every answer.

    Raises:
        ResourceError: the harness is not installed.
        RequestError: an unknown or unsuitable task, or a question the model cannot be asked.
    """
    harness = check_harness()
    if chat and model.template is None:
        raise RequestError(f"`{model.folder}` has no chat template", hint="leave out --chat")
    from lm_eval.evaluator import evaluate as run

    with contextlib.redirect_stdout(sys.stderr):  # the harness prints now and then
        random.seed(SEEDS[0])
        _seed_numpy_and_torch(SEEDS[1])
        loaded = _load_tasks(names, manager, task_folder, few_shot)
        lm = language_model(model, chat, thinking, progress)
        started = time.perf_counter()
        results = run(
            lm=lm,
            task_dict=loaded,
            limit=limit,
            log_samples=False,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
        )
    common = {"limit": limit, "chat": chat, "context": model.context, "device": model.device}
    report = TaskReport(
        lowbit_version=version("lowbit"),
        harness=harness,
        manifest_sha256=manifest_sha256(model.folder),
        tasks=read_results(results, common),
    )
    return Evaluation(report, lm.truncated, time.perf_counter() - started)


def read_results(results: dict[str, Any], common: dict[str, Any]) -> tuple[TaskResult, ...]:
    """The rows of a harness's result.

    Args:
        results: what `lm_eval.evaluate` returns.
        common: the fields that all rows share.
    """
    rows = []
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            name, comma, applied = key.partition(",")
            if not comma or name.endswith("_stderr"):
                continue
            rows.append(
                TaskResult(
                    task=task,
                    metric=name if applied == "none" else f"{name} ({applied})",
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


def _finite(value: Any) -> float | None:
    """A figure of the harness, which has texts and NaN for what it does not know."""
    try:
        figure = float(value)
    except (TypeError, ValueError):
        return None
    return figure if math.isfinite(figure) else None


def _load_tasks(
    names: Sequence[str], manager: Any, folder: Path | None, few_shot: int | None
) -> Any:
    """Tasks by name, as the harness loads them.

    Raises:
        RequestError: an unknown task, a broken one, or one that is not for a language model.
    """
    from datasets.exceptions import DatasetsError

    try:
        with contextlib.chdir(folder or Path()):
            loaded = (manager or _find_tasks(names, folder)).load(list(names))
    except (DatasetsError, KeyError, TypeError, ValueError) as error:
        tasks = ", ".join(f"`{name}`" for name in names)
        raise RequestError(f"{tasks} cannot be loaded: {error}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise RequestError(f"`{name}` runs what the model writes, or shows it pictures")
        wanted = task.get_config("num_fewshot")
        if few_shot is not None and wanted != 0:  # a task that says 0 means it
            task.set_config("num_fewshot", few_shot)
        elif wanted is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(SEEDS[2])
    return loaded


def _find_tasks(names: Sequence[str], folder: Path | None) -> Any:
    """A task manager that knows the names.

    Raises:
        RequestError: none does.
    """
    from lm_eval.tasks import TaskManager

    if folder is not None:
        # The harness's own 14,000 tasks take seconds to list.
        local = TaskManager(include_path=str(Path().resolve()), include_defaults=False)
        if set(names) <= set(local.all_subtasks):
            return local
    manager = TaskManager(include_path=None if folder is None else str(Path().resolve()))
    known = manager.all_tasks
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else None
            raise RequestError(f"there is no task `{name}`", hint=hint)
    return manager


def _seed_numpy_and_torch(seed: int) -> None:
    import numpy

    numpy.random.seed(seed)
    torch.manual_seed(seed)
