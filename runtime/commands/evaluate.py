"""`lowbit-run evaluate`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.runtime.options import (
    json_option,
    load_model,
    load_options,
    model_argument,
    note,
    print_json,
    reported,
)

if TYPE_CHECKING:
    from lowbit.formats.tasks import TaskReport
    from lowbit.runtime.harness import Progress


@click.command()
@model_argument
@click.option("--tasks", required=True, metavar="NAMES", help="Tasks or groups, with commas.")
@click.option(
    "--task-folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where further tasks are described (YAML; their files are relative to the folder).",
)
@click.option("--limit", type=click.IntRange(min=1), help="Samples of each task  [default: all].")
@click.option(
    "--num-fewshot",
    type=click.IntRange(min=0),
    help="Examples before each question  [default: the task's].",
)
@click.option(
    "--chat/--raw",
    default=False,
    show_default=True,
    help="Put questions through the chat template, or give them as they are.",
)
@click.option(
    "--think/--no-think",
    "thinking",
    default=None,
    help="With --chat: switch thinking on or off  [default: the model's].",
)
@load_options
@json_option
@reported
def evaluate(
    *,
    name: str,
    tasks: str,
    task_folder: Path | None,
    limit: int | None,
    num_fewshot: int | None,
    chat: bool,
    thinking: bool | None,
    context: int | None,
    device: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Score MODEL on tasks through lm-evaluation-harness.

    The results of a packed folder are kept in its tasks.json, where the quality report finds
    them.
    """
    from lowbit.formats.tasks import merged, read_tasks, write_tasks
    from lowbit.runtime.evaluate import check_harness
    from lowbit.runtime.evaluate import evaluate as run

    names = [task.strip() for task in tasks.split(",") if task.strip()]
    if not names:
        raise click.UsageError("--tasks names no task.")
    if thinking is not None and not chat:
        raise click.UsageError("--think and --no-think need --chat.")
    check_harness()
    model = load_model(name, device, context, threads)
    with _progress_bar(quiet=as_json) as progress:
        done = run(
            model,
            names,
            task_folder=task_folder,
            limit=limit,
            few_shot=num_fewshot,
            chat=chat,
            thinking=thinking,
            progress=progress,
        )
    if as_json:
        extra = {"truncated": done.truncated, "seconds": done.seconds}
        print_json({**done.report.to_json(), **extra})
    else:
        _show(done.report, name)
    if done.truncated:
        note(f"{done.truncated} requests lost their beginning: the context is {model.context}")
    if done.report.manifest_sha256 is None or not Path(name).is_dir():
        note("not kept: only a folder of lowbit-convert has a tasks.json")
        return
    path = write_tasks(model.folder, merged(read_tasks(model.folder), done.report))
    note(f"written to {path}")


def _show(report: "TaskReport", name: str) -> None:
    """A table on stderr."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    title = f"{escape(name)} by {report.harness}"
    table = Table("task", "metric", title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in ("value", "± standard error", "samples", "few-shot"):
        table.add_column(column, justify="right")
    for row in report.tasks:
        better = {True: " ↑", False: " ↓", None: ""}[row.higher_is_better]
        table.add_row(
            escape(row.task),
            escape(row.metric) + better,
            _figure(row.value),
            _figure(row.stderr),
            str(row.samples),
            "-" if row.few_shot is None else str(row.few_shot),
        )
    Console(stderr=True, highlight=False).print(table)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


@contextmanager
def _progress_bar(quiet: bool) -> Iterator["Progress"]:
    """A function of (answered, in all) that draws a bar on stderr while somebody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns: tuple[Any, ...] = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("answers", start=True, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
