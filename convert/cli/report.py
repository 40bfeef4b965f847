"""`lowbit-convert report`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.convert.cli import options
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option
from lowbit.formats.shell.output import note, print_json
from lowbit.formats.shell.task_options import task_names, task_options, task_sequences

if TYPE_CHECKING:
    from lowbit.convert.measure.gate import Condition
    from lowbit.convert.pipeline.origin import Ask, Origin
    from lowbit.convert.report.reporting import LogitRequest
    from lowbit.formats.activation_modes import Activations
    from lowbit.formats.packed import PackedCheckpoint
    from lowbit.formats.tasks import TaskSettings


@click.command(
    short_help="Compare with the original.",
    epilog="""\b
    Examples:
      lowbit-convert report qwen3-8b-int4 --gate 'kl_mean<0.03,top1>0.94'
      lowbit-convert report qwen3-8b-int4 --source Qwen/Qwen3-8B --json
      lowbit-convert report qwen3-8b-int4 --check qwen3-8b-int4
      lowbit-convert report qwen3-8b-int4 --tasks ifeval --chat --no-think
    """,
)
@options.folder
@options.original_option(
    "The original, a folder or a Hub id.",
    "the Hub id in lowbit.json, or the folder that DIR was converted from",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    show_default="DIR",
    help="Write quality.json, quality.html and the card there.",
)
@click.option(
    "--long",
    is_flag=True,
    help="Also on windows of up to 32,768 tokens: passages repeated, lines looked up far back, and "
    "an INT8 cache of keys and values against a BF16 one.",
)
@click.option(
    "--check",
    type=click.Path(path_type=Path),
    metavar="QUALITY",
    help="Measure again what a quality.json, or the one in a folder, states of DIR, write nothing, "
    "and exit with 3 where a figure moved by more than its error.",
)
@click.option(
    "--tasks",
    metavar="NAMES",
    help="First ask both models these tasks of lm-evaluation-harness, or groups of tasks, with "
    "commas, by lowbit-run evaluate; the report has both results, and the difference with its "
    "standard error.",
)
@task_options
@task_sequences
@options.report_activations
@options.eval_text
@options.gate
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace a report that is judged even by one that is not.",
)
@options.device
@json_option
@reported
def report(
    folder: Path,
    source: str | None,
    out: Path | None,
    long: bool,
    check: Path | None,
    tasks: str | None,
    activations: "Activations",
    eval_texts: tuple[Path, ...],
    gate: tuple["Condition", ...],
    overwrite: bool,
    device: str,
    as_json: bool,
    **put: Any,
) -> None:
    """Compare the packed checkpoint DIR with its original: weights, logits, perplexity.

    The original is what the hashes in lowbit.json say, and is checked by them first.
    """
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import conversion as render
    from lowbit.convert.measure.gate import check_tower, evaluate, gate_json
    from lowbit.convert.measure.tasks import check_harness
    from lowbit.convert.report import reporting
    from lowbit.formats.packed import open_packed
    from lowbit.formats.tasks import TaskSettings

    names, sequences = task_names(tasks, put), put.pop("max_sequences")
    texts = reporting.read_texts(eval_texts)
    options.check_gate(gate, texts, long)
    asks = not as_json and sys.stdin.isatty() and sys.stderr.isatty()
    packed = open_packed(folder)
    request = reporting.LogitRequest(
        *(texts, device, None if as_json else note, long, overwrite, activations)
    )
    ask = _ask if asks else None
    if check is not None:
        if out is not None or overwrite or gate or long or names:
            raise click.UsageError(
                "--check takes no --out, --overwrite, --gate, --long or --tasks."
            )
        _check(packed, check, source, request, ask, as_json)
        return
    check_tower(gate, bool(packed.carried))
    if names:
        check_harness()
    origin = reporting.prepare_report(packed, source, ask, out, bool(names))
    if names:
        settings = TaskSettings(names, **put)
        origin = _ask_tasks(packed, origin, settings, device, sequences, out, as_json)
    with progress_bars(quiet=as_json) as progress:
        found = reporting.write_full_report(packed, origin, request, progress, out)
    outcomes = evaluate(gate, found.quality)
    if as_json:
        content = render.quality_json(folder, found)
        print_json({**content, "gate": gate_json(outcomes) if gate else None})
    else:
        render.quality(found)
    try:
        options.close_gate(outcomes)
    finally:
        found.raise_failure()


def _ask_tasks(
    packed: "PackedCheckpoint",
    origin: "Origin",
    settings: "TaskSettings",
    device: str,
    sequences: int | None,
    out: Path | None,
    quiet: bool,
) -> "Origin":
    """Put tasks to both models and keep the results in tasks.json; the original, found."""
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.measure.tasks import TasksError, measure_tasks
    from lowbit.convert.report.files import save_tasks

    with progress_bars(quiet=quiet) as progress:
        origin = origin.settled(progress)
    folders = origin.candidates[0].folder, packed.checkpoint.folder
    try:
        results = measure_tasks(folders, settings, device, None if quiet else note, sequences)
    except TasksError as error:  # which has been shown
        raise click.exceptions.Exit(error.exit_code) from None
    save_tasks(folders[1], results, out)
    return origin


def _check(
    packed: "PackedCheckpoint",
    check: Path,
    source: str | None,
    request: "LogitRequest",
    ask: "Ask | None",
    as_json: bool,
) -> None:
    """Measure a report again, show both, and end with exit code 3 where they disagree."""
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import agreement as render
    from lowbit.convert.measure.agreement import agreements, read_claim
    from lowbit.convert.pipeline.origin import find_origin
    from lowbit.convert.report.reporting import full_report

    claim = read_claim(check, packed.manifest_sha256, request.texts)
    origin = find_origin(packed.checkpoint.folder, packed.manifest, source, ask)
    with progress_bars(quiet=as_json) as progress:
        again, _ = full_report(packed, origin, request, progress)
    rows = agreements(claim, again)
    if as_json:
        print_json(render.agreement_json(check, rows))
    else:
        render.agreement(check, claim, rows)
    if not all(row.agrees for row in rows):
        raise click.exceptions.Exit(3)


def _ask(question: str) -> str:
    answer: str = click.prompt(question, err=True)
    return answer
