"""`lowbit-convert cut-vocabulary`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lowbit.convert.cli import options
from lowbit.convert.cli.vocabulary_options import KEEP_HELP, languages_option, parse_kept
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import check_command, json_option
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
@options.source
@options.out
@click.option(
    "--keep",
    callback=parse_kept,
    metavar="N|FILE",
    required=True,
    help=KEEP_HELP,
)
@options.text_option(
    "--text",
    "Text whose tokens are kept first, .txt or .jsonl; best one in the languages and on the "
    "subjects that the model will be used for.",
)
@languages_option("--languages", "")
@options.shard_option()
@options.eval_texts_option(
    "Text whose tokens are counted before and after (repeatable).",
    "prose, maths and code, and four other languages",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Run both models in FP32, a layer at a time, and tell how many bits they need for a byte "
    "of those texts.",
)
@options.device
@options.revision
@json_option
@reported
def cut_vocabulary(
    source: str,
    out: Path,
    keep: int | Path,
    eval_texts: tuple[Path, ...],
    measure: bool,
    device: str,
    revision: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Write the original SRC with a smaller vocabulary into the new folder OUT.

    Embedding and head keep the rows of N tokens, all else stays as it is. OUT is an original like
    SRC, to be quantized, planned or measured next; `quantize --keep-vocabulary` does both steps at
    once. Decoding then reads fewer bytes a token. Kept are the 256 bytes, the added tokens and what
    the model's files name, then the tokens that the text uses most, then those of --languages, then
    single characters of all scripts, then those that languages and code need most, each with the
    parts that it is merged from. Any text still encodes. Words whose tokens are left out come in
    more pieces, which the model has seldom seen: --measure tells what that costs.
    """
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.report.reporting import read_texts
    from lowbit.convert.texts.evaluation import vocabulary_texts
    from lowbit.convert.vocabulary.cut import CutRequest, cut_vocabulary

    check_command(source)
    given = click.get_current_context().get_parameter_source("device")
    if not measure and given is not ParameterSource.DEFAULT:
        raise click.UsageError("--device is for --measure.")
    texts = read_texts(eval_texts) if eval_texts else vocabulary_texts()
    measure_on = device if measure else None
    request = CutRequest(keep, texts=texts, measure_on=measure_on, **settings)
    with progress_bars(quiet=as_json) as progress:
        done = cut_vocabulary(source, out, request, revision=revision, progress=progress)
    if as_json:
        print_json(done.to_json())
    else:
        _show(done)


def _show(done: "CutModel") -> None:
    from lowbit.convert.cli.tables.lines import aside, ok
    from lowbit.convert.cli.tables.vocabulary import vocabulary
    from lowbit.convert.report.formatting import size

    kept = done.record
    ok(
        f"{done.folder}: {kept.rows:,} of {kept.source_tokens:,} tokens, "
        f"{size(done.weight_bytes)} of weights instead of {size(done.source_bytes)}"
    )
    vocabulary(kept)
    if done.left_out:
        aside(f"left out: {', '.join(done.left_out)}, which tokenizer.json replaces")
    note(f"next: {shlex.join(['lowbit-convert', str(done.folder), 'OUT'])}", fold=False)
