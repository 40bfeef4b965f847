"""Options of a smaller vocabulary."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowbit.convert.cli import options
from lowbit.formats.shell.failure import Command
from lowbit.formats.shell.options import Count, with_options

if TYPE_CHECKING:
    from lowbit.convert.texts.evaluation import Text
    from lowbit.convert.vocabulary.cut import CutRequest

KEEP_HELP = (
    "Tokens to keep, rounded up to a multiple of 128; or a file that lists them: a JSON array of "
    "ids, or the kept_vocabulary.json of another cut."
)


LANGUAGES_HELP = (
    "Languages whose most used words are kept next, by code: de,fr,zh. Without this option, "
    "tokens of the bundled text are kept next, then those of 26 languages, at fixed shares."
)


def parse_languages(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> tuple[str, ...]:
    """Codes that commas separate."""
    return tuple(filter(None, map(str.strip, (text or "").split(","))))


def languages_option(name: str, before: str) -> Callable[[Command], Command]:
    """Option of languages that a vocabulary keeps; `before` begins its help."""
    return click.option(
        name,
        "languages",
        callback=parse_languages,
        metavar="CODES",
        help=f"{before}{LANGUAGES_HELP}",
    )


def parse_kept(ctx: click.Context, param: click.Parameter, text: str | None) -> int | Path | None:
    """A number of tokens, or the file that lists them."""
    if text is None or ctx.resilient_parsing:
        return None
    if text.isdecimal():
        return Count().convert(text, param, ctx)
    path = Path(text)
    if not path.exists():
        raise click.BadParameter(f"{text!r} is neither a number of tokens nor a file.")
    return path


vocabulary_options = with_options(
    click.option(
        "--keep-vocabulary",
        callback=parse_kept,
        metavar="N|FILE",
        help="Cut the vocabulary first: fewer bytes a token, and rare words in more pieces. "
        f"{KEEP_HELP} The original so cut stays at OUT.original; with --report its bits a byte are "
        "measured before and after the cut.",
    ),
    options.text_option(
        "--vocabulary-text",
        "For --keep-vocabulary: text whose tokens are kept first, .txt or .jsonl; best one in the "
        "languages and on the subjects that the model will be used for.",
    ),
    languages_option("--vocabulary-languages", "For --keep-vocabulary: "),
)


def make_cut_request(
    keep: int | Path | None,
    text: Path | None,
    languages: Sequence[str],
    texts: Sequence["Text"],
    measure_on: str | None,
    max_shard_bytes: int,
) -> "CutRequest | None":
    """Request that the options make; None where the vocabulary stays whole.

    Args:
        texts: of --eval-text; empty for the bundled ones.
        measure_on: `cpu` or `cuda` where bits a byte are to be measured.

    Raises:
        click.UsageError: a text or languages without --keep-vocabulary.
    """
    if keep is None:
        if text is not None:
            raise click.UsageError("--vocabulary-text is for --keep-vocabulary.")
        if languages:
            raise click.UsageError("--vocabulary-languages is for --keep-vocabulary.")
        return None
    from lowbit.convert.texts.evaluation import vocabulary_texts
    from lowbit.convert.vocabulary.cut import CutRequest

    compared = tuple(texts) or vocabulary_texts()
    return CutRequest(keep, text, languages, compared, measure_on, max_shard_bytes)
