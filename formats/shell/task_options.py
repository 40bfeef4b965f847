"""Options by which tasks of lm-evaluation-harness are put to a model, of both commands."""

from pathlib import Path
from typing import Any

import click

from lowbit.formats.sequence_counts import CHOSEN_SEQUENCES
from lowbit.formats.shell.options import Count, folders, sequences_option, with_options

# Parameters of `task_options` and `task_sequences`: the option that the user writes, and the value
# without it.
FLAGS = {
    "task_folder": ("--task-folder", None),
    "limit": ("--limit", None),
    "few_shot": ("--num-fewshot", None),
    "chat": ("--chat", False),
    "thinking": ("--think or --no-think", None),
    "max_sequences": ("--sequences", None),
}

task_options = with_options(
    click.option(
        "--task-folder",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        shell_complete=folders,
        metavar="DIR",
        help="Where further tasks are described, as YAML; their files are relative to DIR.",
    ),
    click.option(
        "--limit", type=Count(), metavar="N", show_default="all", help="Samples of each task."
    ),
    click.option(
        "--num-fewshot",
        "few_shot",
        type=Count(0),
        metavar="N",
        show_default="the task's",
        help="Examples before each question.",
    ),
    click.option(
        "--chat/--raw",
        default=False,
        show_default=True,
        help="Put questions through the chat template, or give them as they are.",
    ),
    click.option(
        "--think/--no-think",
        "thinking",
        default=None,
        show_default="the model's",
        help="With --chat: switch thinking on or off.",
    ),
)

task_sequences = sequences_option(
    help="Answers that are made together, each of which may take memory for a context; likelihoods "
    "are taken one after another.",
    shown=f"1 on a CPU, up to {CHOSEN_SEQUENCES} by a GPU's memory",
)


def task_names(tasks: str | None, given: dict[str, Any]) -> tuple[str, ...]:
    """Names in --tasks; empty where it was left out.

    Args:
        given: values of `task_options`, and of `task_sequences` where a command has its own use
            of them.

    Raises:
        click.UsageError: options that would have no effect, or no name between the commas.
    """
    if tasks is None:
        for name, (flag, absent) in FLAGS.items():
            if given.get(name, absent) is not absent:
                raise click.UsageError(f"{flag} needs --tasks.")
        return ()
    names = tuple(task.strip() for task in tasks.split(",") if task.strip())
    if not names:
        raise click.UsageError("--tasks names no task.")
    if given["thinking"] is not None and not given["chat"]:
        raise click.UsageError("--think and --no-think need --chat.")
    return names
