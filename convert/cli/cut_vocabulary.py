"""`lowbit-convert cut-vocabulary`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from lowbit.convert.cli.options import (
    device_option,
    out_argument,
    parse_size,
    source_argument,
    text_option,
)
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import Count, check_command, json_option
from lowbit.formats.shell.output import note, print_json

if TYPE_CHECKING:
    from lowbit.convert.vocabulary.cut import CutModel


@click.command(
    name="cut-vocabulary",
    short_help="Keep the tokens that a text needs.",
    epilog="""\b
    Example:
      lowbit-convert cut-vocabulary Qwen/Qwen3.5-0.8B small --keep 65536
    """,
)
@source_argument
@out_argument
@click.option(
    "--keep",
    "tokens",
    type=Count(),
    metavar="N",
    required=True,
    help="Tokens to keep, rounded up to a multiple of 128.",
)
@text_option(
    "--text",
    "Text whose tokens are kept first, .txt or .jsonl; best one in the languages and on the "
    "subjects that the model will be used for.",
)
@click.option(
    "--max-shard-size",
    callback=parse_size,
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="Limit of a weight file.",
)
@click.option(
    "--eval-text",
    "eval_texts",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    show_default="200 kB of WikiText-2, then maths and code",
    help="Text whose tokens are counted before and after (repeatable).",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Run both models in FP32, a layer at a time, and tell how many bits they need for a byte "
    "of those texts.",
)
@device_option
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub id.")
@json_option
@reported
def cut_vocabulary(
    source: str,
    out: Path,
    tokens: int,
    text: Path | None,
    max_shard_size: int,
    eval_texts: tuple[Path, ...],
    measure: bool,
    device: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Write the original SRC with a smaller vocabulary into the new folder OUT.

    Embedding and head keep the rows of N tokens, all else stays as it is. OUT is an original like
    SRC, to be quantized next: decoding reads fewer bytes a token. Kept are the 256 bytes, the added
    tokens and what the model's files name, then the tokens that the text uses most, then those of
    lowest id, each with the parts that it is merged from. Any text still encodes. Words whose
    tokens are left out come in more pieces, which the model has seldom seen: --measure tells what
    that costs.
    """
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.report.reporting import read_texts
    from lowbit.convert.vocabulary.cut import cut_vocabulary

    check_command(source)
    given = click.get_current_context().get_parameter_source("device")
    if not measure and given is not ParameterSource.DEFAULT:
        raise click.UsageError("--device is for --measure.")
    texts = read_texts(eval_texts)
    with progress_bars(quiet=as_json) as progress:
        done = cut_vocabulary(
            source,
            out,
            tokens,
            text=text,
            texts=texts,
            measure_on=device if measure else None,
            revision=revision,
            max_shard_bytes=max_shard_size,
            progress=progress,
        )
    if as_json:
        print_json(done.to_json())
    else:
        _show(done)


def _show(done: "CutModel") -> None:
    """Print what is kept, and how much longer texts get."""
    from lowbit.convert.report.formatting import bits, percent, size
    from lowbit.formats.printable import printable
    from lowbit.formats.shell.tables import plain_table, results, styled

    console, kept = results(), done.record
    console.print(
        styled(
            ("✓", "bold green"),
            f" {done.folder}: {kept.rows:,} of {kept.source_tokens:,} tokens, "
            f"{size(done.weight_bytes)} of weights instead of {size(done.source_bytes)}",
        )
    )
    console.print(
        f"kept: {percent(kept.coverage, 1)} of the tokens of {printable(kept.text)}, "
        f"{percent(kept.held_out, 1)} of the half left out of a count"
    )
    table = plain_table("tokens of a text", ("text",), ("before", "after", "more"))
    for row in kept.lengths:
        counts = (f"{row.tokens_before:,}", f"{row.tokens_after:,}", percent(row.growth, 1))
        table.add_row(row.text, *counts)
    console.print(table)
    measured = [row for row in kept.lengths if row.bits_before is not None]
    if measured:
        table = plain_table("bits a byte, both models in FP32", ("text",), ("before", "after"))
        for row in measured:
            table.add_row(row.text, bits(row.bits_before), bits(row.bits_after))
        console.print(table)
    if done.left_out:
        names = ", ".join(done.left_out)
        console.print(styled((f"left out: {names}, which tokenizer.json replaces", "dim")))
    note(f"next: {shlex.join(['lowbit-convert', str(done.folder), 'OUT'])}", fold=False)
