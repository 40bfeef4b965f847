"""Tasks put to a packed folder and its original by `lowbit-run evaluate`, a process for each.

The two answer the same questions with the same code, so their scores are compared question by
question: what is hard for one is hard for the other, and the error of the difference is smaller
than that of either. A score that is no mean over questions, as that of a group, has the error of
two independent results. The harness states no error of a mean over several scores a question, such
as the instructions of IFEval; it is taken from the scores.
"""

import importlib.util
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lowbit.convert.original.progress import Note, unsaid
from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.tasks import (
    OriginalResult,
    SampleScores,
    TaskReport,
    TaskResult,
    TaskRun,
    TaskSettings,
    harness_missing,
    read_run,
)

HARNESS = "lm_eval"  # package of lm-evaluation-harness
LEAST_SAMPLES = 2  # for a standard error

Pair = tuple[SampleScores, SampleScores]  # of the original, and of the packed model


class TasksError(LowbitError):
    """`lowbit-run evaluate` has failed, and said why on stderr; `exit_code` is its own."""

    def __init__(self, folder: Path, exit_code: int) -> None:
        """Keep the exit code."""
        super().__init__(f"`lowbit-run evaluate {folder}` ended with exit code {exit_code}")
        self.exit_code = exit_code


def check_harness() -> None:
    """Refuse tasks before any work where nothing could ask them.

    Raises:
        ResourceError: lm-evaluation-harness is not installed.
    """
    if importlib.util.find_spec(HARNESS) is None:
        raise harness_missing(f"there is no package `{HARNESS}`")


def measure_tasks(
    folders: tuple[Path, Path],
    settings: TaskSettings,
    device: str,
    note: Note | None,
    sequences: int | None = None,
) -> TaskReport:
    """Results of a packed folder, each beside the original's.

    The original comes first: it takes more memory, and a mistake in a task shows at once.

    Args:
        folders: of the original, and the packed one.
        device: `cpu` or `cuda`.
        note: told which of them is asked; None also keeps progress bars off stderr, but no error.
        sequences: answers that each makes together; None for the default of the command.

    Raises:
        TasksError: one of the two could not be asked.
        ResourceError: the system has ended one of the processes.
    """
    original, packed = folders
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "run.json"
        words = [*_words(settings), "--device", device, "--out", str(file)]
        words += ["--json"] if note is None else []
        words += [] if sequences is None else ["--sequences", str(sequences)]
        tell = note or unsaid
        tell(f"tasks, the original: {original}")
        first = _run(original, words, file)
        # One context for both: a question that does not fit in loses its beginning.
        contexts = {row.context for row in first.report.tasks}
        words += [word for context in contexts for word in ("--context", str(context))]
        tell(f"tasks, the packed model: {packed}")
        return beside(first, _run(packed, words, file))


def beside(original: TaskRun, packed: TaskRun) -> TaskReport:
    """The results of a packed model with those of its original, and their differences."""
    before = {_key(row): row for row in _with_errors(original)}
    pairs = _pairs(original, packed)
    rows = []
    for row in _with_errors(packed):
        key = _key(row)
        other = before.get(key)
        found = None if other is None else _against(other, row, pairs.get(key))
        rows.append(replace(row, original=found))
    return replace(packed.report, tasks=tuple(rows))


def _with_errors(run: TaskRun) -> tuple[TaskResult, ...]:
    """Results of a run; one that the harness has no error for takes that of its scores."""
    scores = {_key(own): own for own in run.scores}

    def completed(row: TaskResult) -> TaskResult:
        own = scores.get(_key(row))
        if row.stderr is not None or own is None:
            return row
        return replace(row, stderr=_ratio_error(own.totals, own.counts))

    return tuple(map(completed, run.report.tasks))


def _key(row: TaskResult | SampleScores) -> tuple[str, str]:
    return row.task, row.metric


def _pairs(original: TaskRun, packed: TaskRun) -> dict[tuple[str, str], Pair]:
    """Scores of both models on the same questions, by task and metric."""
    before = {_key(scores): scores for scores in original.scores}
    pairs = {}
    for own in packed.scores:
        other = before.get(_key(own))
        if other is not None and (own.documents, own.counts) == (other.documents, other.counts):
            pairs[_key(own)] = other, own
    return pairs


def _against(original: TaskResult, packed: TaskResult, pair: Pair | None) -> OriginalResult:
    """The original's result, and the difference with its error."""
    difference = error = None
    if original.value is not None and packed.value is not None:
        difference = packed.value - original.value
        if pair is not None:
            error = paired_error(*pair)
        elif original.stderr is not None and packed.stderr is not None:
            error = math.hypot(original.stderr, packed.stderr)
    return OriginalResult(original.value, original.stderr, difference, error, pair is not None)


def paired_error(first: SampleScores, second: SampleScores) -> float | None:
    """Standard error of the difference of two means over the same questions; None below two."""
    changes = [b - a for a, b in zip(first.totals, second.totals, strict=True)]
    return _ratio_error(changes, first.counts)


def _ratio_error(totals: Sequence[float], counts: Sequence[int]) -> float | None:
    """Standard error of the mean of all scores, from their sum and number by question.

    A question with several scores is one observation: the mean is a ratio, whose error is that of
    the residuals d_i - D n_i, with d_i a question's sum, n_i its scores and D the mean.
    """
    questions = len(totals)
    if questions < LEAST_SAMPLES:
        return None
    count = sum(counts)
    mean = math.fsum(totals) / count
    residuals = ((total - mean * n) ** 2 for total, n in zip(totals, counts, strict=True))
    return math.sqrt(math.fsum(residuals) * questions / (questions - 1)) / count


def _words(settings: TaskSettings) -> list[str]:
    """The options of `lowbit-run evaluate` for some settings."""
    words = ["--tasks", ",".join(settings.names), "--chat" if settings.chat else "--raw"]
    values: Mapping[str, object] = {
        "--task-folder": settings.task_folder,
        "--limit": settings.limit,
        "--num-fewshot": settings.few_shot,
    }
    for flag, value in values.items():
        words += [] if value is None else [flag, str(value)]
    thinking = {True: ["--think"], False: ["--no-think"], None: []}
    return [*words, *thinking[settings.thinking]]


def _run(folder: Path, words: Sequence[str], file: Path) -> TaskRun:
    """Results of `lowbit-run evaluate`, which ends with this process where a signal ends it."""
    # This Python and its packages, whatever lies in the working directory (-P).
    command = [sys.executable, "-P", "-m", "lowbit.runtime", "evaluate", str(folder.resolve())]
    packages = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Ctrl-C reaches all processes of a terminal, and one farewell is enough.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [*command, *words],
            env=packages,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # its table; the report has both models' results
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if code < 0:
        raise ResourceError(
            f"`lowbit-run evaluate {folder}` was ended by signal {-code}",
            hint="a system without free memory does that; see what else runs there",
        )
    if code:
        raise TasksError(folder, code)
    return read_run(file)
