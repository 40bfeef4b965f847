"""`lowbit-convert calib-text`."""

from pathlib import Path
from typing import Any

import click

from lowbit.convert.cli import options
from lowbit.formats.sampling_ranges import SEEDS
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import Count, json_option, output_file
from lowbit.formats.shell.output import print_json

MOST_ANSWERS = 100_000  # far beyond what a calibration reads


def text_file(ctx: click.Context, param: click.Parameter, value: Path) -> Path:
    """Refuse a name by which --calib would not know the text, or that cannot be written."""
    if not ctx.resilient_parsing and value.suffix != ".txt":
        raise click.BadParameter(f"`{value}` does not end in .txt.")
    output_file(ctx, param, value)
    return value


@click.command(
    name="calib-text",
    short_help="Let SRC write a text to calibrate on.",
    epilog="""\b
    Example:
      lowbit-convert calib-text Qwen/Qwen3-8B own.txt
    """,
)
@options.source
@click.argument("out", metavar="OUT.txt", type=click.Path(path_type=Path), callback=text_file)
@click.option(
    "--answers",
    type=Count(most=MOST_ANSWERS),
    metavar="N",
    default=240,
    show_default=True,
    help="Prompts that SRC answers.",
)
@click.option(
    "--tokens",
    type=Count(),
    metavar="N",
    default=400,
    show_default=True,
    help="Tokens of an answer at most.",
)
@options.device
@click.option(
    "--seed",
    type=Count(0, SEEDS - 1),
    metavar="N",
    default=0,
    show_default=True,
    help="Seed of the prompts and of what is drawn.",
)
@options.revision
@click.option("--overwrite", is_flag=True, help="Replace the file OUT.txt.")
@json_option
@reported
def calib_text(source: str, out: Path, as_json: bool, **settings: Any) -> None:
    """Let the original SRC answer prompts, and write a text that --calib takes.

    OUT.txt holds prompts and answers as the chat template of SRC writes them, followed by the
    bundled calibration text. A model that was trained to answer is calibrated better on both than
    on the bundled text alone. SRC must fit into memory as a whole. Meant for a GPU; on a CPU ask
    for fewer and shorter answers.
    """
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import conversion as render
    from lowbit.convert.texts.own_text import OwnTextRequest, write_own_text

    with progress_bars(quiet=as_json) as progress:
        done = write_own_text(source, out, OwnTextRequest(**settings), progress)
    if as_json:
        print_json(render.own_text_json(done))
    else:
        render.own_text(done, source, settings["revision"])
