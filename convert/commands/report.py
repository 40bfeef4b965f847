"""`lowbit-convert report`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowbit.convert.options import (
    check_gate,
    close_gate,
    device_option,
    dim_note,
    eval_text_option,
    folder_argument,
    gate_option,
    print_json,
    reported,
)

if TYPE_CHECKING:
    from lowbit.convert.gate import Condition


@click.command()
@folder_argument
@click.option("--source", metavar="SRC", help="The original  [default: the Hub id in lowbit.json].")
@eval_text_option
@gate_option
@device_option
@reported
def report(
    folder: Path,
    source: str | None,
    eval_texts: tuple[Path, ...],
    gate: tuple["Condition", ...],
    device: str,
    as_json: bool,
) -> None:
    """Compare the packed checkpoint DIR with its original: weights, logits, perplexity."""
    from lowbit.convert import render, reporting
    from lowbit.convert.gate import hold
    from lowbit.convert.terminal import progress_bars

    texts = reporting.read_texts(eval_texts)
    check_gate(gate, texts)
    request = reporting.LogitRequest(texts, device, None if as_json else dim_note)
    with progress_bars(quiet=as_json) as progress:
        quality = reporting.write_full_report(folder, source, request, progress)
    result = hold(gate, quality)
    if as_json:
        content = render.quality_json(folder, quality)
        print_json({**content, "gate": result.to_json() if gate else None})
    else:
        render.quality(folder, quality)
    close_gate(result)
