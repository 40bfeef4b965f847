"""`lowbit-run evaluate`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.formats.machine.system import install_command
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option, output_file
from lowbit.formats.shell.output import note, print_json
from lowbit.formats.shell.task_options import task_names, task_options, task_sequences
from lowbit.runtime.cli.options import (
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
@task_options
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    callback=output_file,
    help="Write the results, and the score of every sample, to FILE, in place of MODEL's "
    "tasks.json.",
)
@task_sequences
@machine_options
@json_option
@reported
@with_load_options
def evaluate(
    *,
    name: str,
    tasks: str,
    out: Path | None,
    options: "LoadOptions",
    as_json: bool,
    **put: Any,
) -> None:
    """Score MODEL on tasks through lm-evaluation-harness.

    The results of a packed folder are kept in its tasks.json, where the quality report finds
    them.
    """
    from lowbit.formats.files.atomic import check_place, replace_file
    from lowbit.formats.layout.manifest import MANIFEST_FILE
    from lowbit.formats.shell.tables import progress_bars
    from lowbit.formats.tasks import TASKS_FILE, TaskSettings, merged, read_tasks, write_tasks
    from lowbit.runtime.engine.load import choose_device
    from lowbit.runtime.evaluate.evaluate import evaluate as run
    from lowbit.runtime.evaluate.evaluate import find_tasks

    names = task_names(tasks, put)
    keeps = out is None and (Path(name) / MANIFEST_FILE).exists()
    if keeps:
        check_place(Path(name) / TASKS_FILE)
        read_tasks(Path(name))
    settings = TaskSettings(names, **put)
    manager = find_tasks(settings)
    if options.max_sequences is None and choose_device(options.device) == "cpu":
        options = replace(options, max_sequences=1)
    model = load_text_model(name, options)
    with progress_bars({"answers": "answering"}, quiet=as_json) as progress:
        show = partial(progress, "answers")
        done = run(model, settings, manager, show, keep_scores=out is not None)
    if as_json:
        extra = {"truncated": done.truncated, "seconds": done.seconds}
        print_json({**done.report.to_json(), **extra})
    else:
        _show(done.report, name)
    if done.truncated:
        note(f"{done.truncated} requests lost their beginning: the context is {model.context}")
    if out is not None:
        replace_file(out, done.to_bytes())
        return
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
