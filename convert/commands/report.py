"""`lowbit-convert report`."""

from pathlib import Path

import click

from lowbit.convert.options import (
    device_option,
    eval_text_option,
    folder_argument,
    print_json,
    reported,
)


@click.command()
@folder_argument
@click.option("--source", metavar="SRC", help="The original  [default: the Hub id in lowbit.json].")
@eval_text_option
@device_option
@reported
def report(
    folder: Path, source: str | None, eval_text: Path | None, device: str, as_json: bool
) -> None:
    """Compare the packed checkpoint DIR with its original: weights, logits, perplexity."""
    from lowbit.convert import render, reporting
    from lowbit.convert.terminal import progress_bars

    text = reporting.read_text(eval_text)
    with progress_bars(quiet=as_json) as progress:
        quality = reporting.write_full_report(folder, source, text, device, progress)
    if as_json:
        print_json(render.quality_json(folder, quality))
    else:
        render.quality(folder, quality)
