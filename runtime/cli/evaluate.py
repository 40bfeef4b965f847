"""`lowbit-run evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.formats.machine.system import install_command
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import folders, json_option
from lowbit.formats.shell.output import note, print_json
from lowbit.runtime.cli.options import (
    count_option,
    load_text_model,
    machine_options,
    model_argument,
    with_load_options,
)

if TYPE_CHECKING:
    from lowbit.formats.tasks import TaskReport
    from lowbit.runtime.engine.load_options import LoadOptions


@click.command(
    short_help="Score a model on tasks.",
    epilog=f"""\b
    Examples ({install_command("evaluate")} in the clone first):
      lowbit-run evaluate qwen3-8b-int4 --tasks gsm8k --limit 100
      lowbit-run evaluate qwen3-8b-int4 --tasks hellaswag,arc_easy --json
    """,
)
@model_argument
@click.option(
    "--tasks", required=True, metavar="NAMES", help="Tasks or groups of tasks, with commas."
)
@click.option(
    "--task-folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    shell_complete=folders,
    metavar="DIR",
    help="Where further tasks are described, as YAML; their files are relative to DIR.",
)
@count_option("--limit", shown="all", help="Samples of each task.")
@count_option(
    "--num-fewshot",
    "few_shot",
    shown="the task's",
    help="Examples before each question.",
    least=0,
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
    show_default="the model's",
    help="With --chat: switch thinking on or off.",
)
@machine_options
@json_option
@reported
@with_load_options
def evaluate(
    *,
    name: str,
    tasks: str,
    task_folder: Path | None,
    options: "LoadOptions",
    as_json: bool,
    **put: Any,
) -> None:
    """Score MODEL on tasks through lm-evaluation-harness.

    The results of a packed folder are kept in its tasks.json, where the quality report finds
    them.
    """
    from lowbit.formats.files.atomic import check_place
    from lowbit.formats.layout.manifest import MANIFEST_FILE
    from lowbit.formats.shell.tables import progress_bars
    from lowbit.formats.tasks import TASKS_FILE, merged, read_tasks, write_tasks
    from lowbit.runtime.evaluate.evaluate import TaskSettings, find_tasks
    from lowbit.runtime.evaluate.evaluate import evaluate as run

    names = tuple(task.strip() for task in tasks.split(",") if task.strip())
    if not names:
        raise click.UsageError("--tasks names no task.")
    if put["thinking"] is not None and not put["chat"]:
        raise click.UsageError("--think and --no-think need --chat.")
    keeps = (Path(name) / MANIFEST_FILE).exists()
    if keeps:
        check_place(Path(name) / TASKS_FILE)
        read_tasks(Path(name))
    settings = TaskSettings(names, task_folder, **put)
    manager = find_tasks(settings)
    model = load_text_model(name, options)
    with progress_bars({"answers": "answering"}, quiet=as_json) as progress:
        done = run(model, settings, manager, lambda *counts: progress("answers", *counts))
    if as_json:
        extra = {"truncated": done.truncated, "seconds": done.seconds}
        print_json({**done.report.to_json(), **extra})
    else:
        _show(done.report, name)
    if done.truncated:
        note(f"{done.truncated} requests lost their beginning: the context is {model.context}")
    if not keeps:
        note("not kept: only a folder of lowbit-convert has a tasks.json")
        return
    path = write_tasks(model.folder, merged(read_tasks(model.folder), done.report))
    note(f"written to {path}")


def _show(report: "TaskReport", name: str) -> None:
    """Print a table of the results on stdout."""
    from lowbit.formats.shell.tables import plain_table, results

    figures = ("value", "± standard error", "samples", "few-shot")
    table = plain_table(f"{name} by {report.harness}", ("task", "metric"), figures)
    for row in report.tasks:
        better = {True: " ↑", False: " ↓", None: ""}[row.higher_is_better]
        table.add_row(
            row.task,
            row.metric + better + row.rounding,
            _figure(row.value),
            _figure(row.stderr),
            str(row.samples),
            "-" if row.few_shot is None else str(row.few_shot),
        )
    results().print(table)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
