"""`tasks.json`: results of tasks, written and read; and runs with the scores of every sample.

tasks.json belongs to one packed checkpoint: it holds the hash of lowbit.json, which tells results
of an earlier conversion in the same folder apart. A figure that is not finite is null.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lowbit.formats.activation_modes import Activations
from lowbit.formats.errors import FormatError, ResourceError
from lowbit.formats.files.atomic import replace_file
from lowbit.formats.layout.manifest import MANIFEST_FILE
from lowbit.formats.layout.records import load_object, record
from lowbit.formats.machine.system import install_hint
from lowbit.formats.safetensors.hashing import hash_file

TASKS_FILE = "tasks.json"
SCHEMA = 1
AGAIN = "remove the file and run `lowbit-run evaluate` again"


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Tasks, groups or tags, and how they are put to a model."""

    names: tuple[str, ...]
    task_folder: Path | None = None  # further tasks as YAML; paths in them are relative to it
    limit: int | None = None  # samples of each task; None for all
    few_shot: int | None = None  # examples before each question; None leaves it to the tasks
    chat: bool = False  # put questions through the chat template
    # Switches a reasoning model's thinking; None leaves it to the template
    thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class OriginalResult:
    """A metric of the original, asked the same questions, and the change from it."""

    value: float | None  # None where the harness gave no finite number
    stderr: float | None  # standard error; None where it is not known
    difference: float | None  # the packed model's value less this one; None without both
    # Standard error of the difference; None where it is not known
    difference_stderr: float | None
    paired: bool  # True where that error is of differences sample by sample


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One metric of one task, or of a group of tasks."""

    task: str
    metric: str  # name, with the filter in parentheses where the harness applied one
    value: float | None  # None where the harness gave no finite number
    stderr: float | None  # standard error; None where it is not known
    samples: int  # number that was scored
    higher_is_better: bool | None  # None where it is not known
    few_shot: int | None  # examples before each question; None in a group whose tasks differ
    limit: int | None  # most samples of a task; None for all of them
    chat: bool  # True if the chat template was applied
    context: int  # most tokens of prompt and output
    device: str  # `cpu` or `cuda`
    kv_cache: str  # type of keys and values in the cache, `bf16`, `fp32` or `int8`
    version: str  # of the task's definition
    activations: Activations = "exact"  # inputs of quantized linears
    original: OriginalResult | None = None  # None where it was not asked

    @property
    def rounding(self) -> str:
        """`, INT8 cache, INT8 activations`, the parts rounded beside the weights; else empty."""
        parts = {"cache": self.kv_cache, "activations": self.activations}
        return "".join(f", INT8 {part}" for part, kind in parts.items() if kind == "int8")


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Content of tasks.json."""

    lowbit_version: str  # version that ran the model
    harness: str  # program that asked and scored, `lm-eval 0.4.13`
    manifest_sha256: str | None  # of lowbit.json's bytes; None in a folder without one
    tasks: tuple[TaskResult, ...]  # in the order they were asked for

    def to_json(self) -> dict[str, Any]:
        """The object that tasks.json holds."""
        return {"schema": SCHEMA, **asdict(self)}

    def to_bytes(self) -> bytes:
        """The file's content."""
        return _file(self.to_json())


@dataclass(frozen=True, slots=True)
class SampleScores:
    """Scores that a metric of a task is the mean of: its value is sum(totals) / sum(counts)."""

    task: str
    metric: str  # as in `TaskResult`
    documents: tuple[str, ...]  # hash of each question
    totals: tuple[float, ...]  # its score; of several, as of the instructions of IFEval, the sum
    counts: tuple[int, ...]  # number of scores in it


@dataclass(frozen=True, slots=True)
class TaskRun:
    """Results of a run, and how it went."""

    report: TaskReport
    truncated: int  # requests that lost their beginning
    seconds: float  # of all answers
    scores: tuple[SampleScores, ...]  # of metrics that are means; empty where nobody asked for them

    def to_bytes(self) -> bytes:
        """The content of a file."""
        return _file({"schema": SCHEMA, **asdict(self)})


def _file(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def harness_missing(reason: str) -> ResourceError:
    """The error of a machine without lm-evaluation-harness, or a part of it."""
    return ResourceError(
        f"lm-evaluation-harness is missing: {reason}", hint=install_hint("evaluate")
    )


def manifest_sha256(folder: Path) -> str | None:
    """Hash of a folder's lowbit.json; None where it has none."""
    try:
        return hash_file(folder / MANIFEST_FILE)
    except FileNotFoundError:
        return None


def read_tasks(folder: Path) -> TaskReport | None:
    """Read the task results of a packed folder, stale ones too; None where there are none.

    Raises:
        CheckpointError: not a regular file, or a link out of the folder or to nothing.
        FormatError: malformed, or of a schema this release does not know.
    """
    path = folder / TASKS_FILE
    try:
        return record(TaskReport, load_object(path, "schema", SCHEMA, AGAIN), str(path))
    except FileNotFoundError:
        return None
    except FormatError as error:
        raise FormatError(str(error), hint=AGAIN) from None


def read_run(path: Path) -> TaskRun:
    """Read the file of a run.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError, FormatError: as `read_tasks`.
    """
    return record(TaskRun, load_object(path, "schema", SCHEMA, "run it again"), str(path))


def merged(old: TaskReport | None, new: TaskReport) -> TaskReport:
    """New results after old ones of other tasks, from the same versions and the same file."""
    if old is None or replace(old, tasks=new.tasks) != new:
        return new
    again = {row.task for row in new.tasks}
    others = tuple(row for row in old.tasks if row.task not in again)
    return replace(new, tasks=others + new.tasks)


def write_tasks(folder: Path, report: TaskReport) -> Path:
    """Replace tasks.json; a reader sees the old content or all of the new.

    Raises:
        ResourceError: the folder cannot be written to.
    """
    path = folder / TASKS_FILE
    replace_file(path, report.to_bytes())
    return path
