"""`lowbit-convert report`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowbit.convert.cli import options
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option
from lowbit.formats.shell.output import note, print_json

if TYPE_CHECKING:
    from lowbit.convert.measure.gate import Condition
    from lowbit.convert.pipeline.origin import Ask
    from lowbit.convert.report.reporting import LogitRequest
    from lowbit.formats.activation_modes import Activations
    from lowbit.formats.packed import PackedCheckpoint


@click.command(
    short_help="Compare with the original.",
    epilog="""\b
    Examples:
      lowbit-convert report qwen3-8b-int4 --gate 'kl_mean<0.03,top1>0.94'
      lowbit-convert report qwen3-8b-int4 --source Qwen/Qwen3-8B --json
      lowbit-convert report qwen3-8b-int4 --check qwen3-8b-int4
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
    activations: "Activations",
    eval_texts: tuple[Path, ...],
    gate: tuple["Condition", ...],
    overwrite: bool,
    device: str,
    as_json: bool,
) -> None:
    """Compare the packed checkpoint DIR with its original: weights, logits, perplexity.

    The original is what the hashes in lowbit.json say, and is checked by them first.
    """
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import conversion as render
    from lowbit.convert.measure.gate import check_tower, evaluate, gate_json
    from lowbit.convert.report import reporting
    from lowbit.formats.packed import open_packed

    texts = reporting.read_texts(eval_texts)
    options.check_gate(gate, texts, long)
    asks = not as_json and sys.stdin.isatty() and sys.stderr.isatty()
    packed = open_packed(folder)
    request = reporting.LogitRequest(
        *(texts, device, None if as_json else note, long, overwrite, activations)
    )
    ask = _ask if asks else None
    if check is not None:
        if out is not None or overwrite or gate or long:
            raise click.UsageError("--check takes no --out, --overwrite, --gate or --long.")
        _check(packed, check, source, request, ask, as_json)
        return
    check_tower(gate, bool(packed.carried))
    origin = reporting.prepare_report(packed, source, ask, out)
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
