"""`lowbit-convert finetune-mtp`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lowbit.convert.cli import options
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import Count, json_option
from lowbit.formats.shell.output import print_json


@click.command(
    name="finetune-mtp",
    short_help="Train the head that drafts tokens.",
    epilog="""\b
    Example:
      lowbit-convert finetune-mtp qwen3.5-4b-int4 --text own.txt --device cuda
    """,
)
@options.folder
@options.text_option(
    "--text",
    "Text to learn on, .txt or .jsonl; best one in the model's own words, as `calib-text` "
    "writes it, on what it will be used for.",
)
@click.option(
    "--steps",
    type=Count(),
    metavar="N",
    default=600,
    show_default=True,
    help="Windows of text to learn from, one a step.",
)
@click.option(
    "--windows",
    type=Count(2),
    metavar="N",
    show_default="64 on a CPU, else 1024",
    help="Different windows of the text at most.",
)
@click.option(
    "--length",
    type=Count(8),
    metavar="N",
    default=512,
    show_default=True,
    help="Tokens of a window.",
)
@options.device
@json_option
@reported
def finetune_mtp(folder: Path, as_json: bool, **settings: Any) -> None:
    """Train the head for multi-token prediction of the packed folder DIR on DIR's own predictions.

    Drafts get better, answers stay as they are: only the head's codes and norms are learned. Every
    eighth window is held out; DIR is exchanged, as a whole, if its drafts make more tokens a round
    on those. Interrupted, the same command continues. Reports in DIR are removed; make them again.
    """
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import conversion as render
    from lowbit.convert.pipeline.finetune import finetune_mtp

    with progress_bars(quiet=as_json) as progress:
        done = finetune_mtp(folder, progress=progress, **settings)
    if as_json:
        print_json({**asdict(done), "folder": str(done.folder)})
    else:
        render.finetuned(done)
