"""`lowbit-convert calib-text`."""

from pathlib import Path

import click

from lowbit.convert.cli.options import (
    device_option,
    revision_option,
    source_argument,
)
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
@source_argument
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
@device_option
@click.option(
    "--seed",
    type=Count(0, SEEDS - 1),
    metavar="N",
    default=0,
    show_default=True,
    help="Seed of the prompts and of what is drawn.",
)
@revision_option
@click.option("--overwrite", is_flag=True, help="Replace the file OUT.txt.")
@json_option
@reported
def calib_text(
    source: str,
    out: Path,
    answers: int,
    tokens: int,
    device: str,
    seed: int,
    revision: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Let the original SRC answer prompts, and write a text that --calib takes.

    OUT.txt holds prompts and answers as the chat template of SRC writes them, followed by the
    bundled calibration text. A model that was trained to answer is calibrated better on both than
    on the bundled text alone. SRC must fit into memory as a whole. Meant for a GPU; on a CPU ask
    for fewer and shorter answers.
    """
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import conversion as render
    from lowbit.convert.pipeline.own_text import write_own_text

    with progress_bars(quiet=as_json) as progress:
        done = write_own_text(
            source,
            out,
            answers=answers,
            tokens=tokens,
            device=device,
            seed=seed,
            revision=revision,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        print_json(render.own_text_json(done))
    else:
        render.own_text(done, source, revision)
