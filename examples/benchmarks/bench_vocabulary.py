"""Bytes of text a second with the whole vocabulary and with a smaller one, of random weights.

Run: python examples/benchmarks/bench_vocabulary.py SIZE TOKENIZER [--keep N] [--text NAME=FILE]...
     [--vocabulary-text FILE] [--no-speed]
Sizes are those of `make_random_checkpoint`; TOKENIZER is the folder of the real one. It is cut as
`lowbit-convert cut-vocabulary --keep N` does. Tokens of the bundled evaluation texts and of FILEs
are counted by both. Then two INT4 engines, which differ in rows of embedding and head alone, decode
in turn; a round is the median of the captures of `bench_models`, a speed the median of the rounds.
Bytes a second are tokens a second times bytes a token: what a reader or a compiler is given. A
trained model may need more tokens still, where it has seldom seen the pieces.
"""

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from bench_models import captured_us
from make_random_checkpoint import HYBRID_SIZES, SIZES, config_of
from random_engine import CONTEXT, GROUP, bits_of, engine_of

from lowbit.convert.texts.evaluation import vocabulary_texts
from lowbit.convert.texts.token_counts import count_text
from lowbit.convert.vocabulary.choice import choose_tokens
from lowbit.convert.vocabulary.languages import common_tokens
from lowbit.convert.vocabulary.tokenizer import cut_tokenizer, open_tokenizer
from lowbit.formats.architectures import tensor_table
from lowbit.formats.shell.tables import plain_table, results
from lowbit.formats.text.tokenizer import TOKENIZER_FILE, load_text_tokenizer
from lowbit.runtime.lab.bench import GREEDY

BITS = 4
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a text, by both tokenizers."""

    name: str
    size_bytes: int
    whole: int
    cut: int


def count_both(
    folder: Path, rows: int, keep: int, counted: Path | None, texts: Sequence[tuple[str, str]]
) -> tuple[int, list[Lengths]]:
    """Rows that a cut leaves, and the lengths of texts, (name, content) each.

    Args:
        folder: of the tokenizer.
        rows: of the whole embedding.
        keep: tokens to keep.
        counted: text whose tokens are kept; the bundled one where left out.
        texts: to count.

    Raises:
        LowbitError: a tokenizer that cannot be cut, or not to so few tokens.
    """
    before = load_text_tokenizer(folder, "a smaller vocabulary")
    source = open_tokenizer(before)
    text, common = count_text(before, rows, counted), common_tokens(source, before)
    kept = choose_tokens(source, text, keep, frozenset(), common).ids
    with tempfile.TemporaryDirectory() as out:
        (Path(out) / TOKENIZER_FILE).write_text(json.dumps(cut_tokenizer(source, kept)))
        after = load_text_tokenizer(Path(out))
        contents = [content for _, content in texts]
        pairs = zip(before.encode_all(contents), after.encode_all(contents), strict=True)
        return len(kept), [
            Lengths(name, len(content.encode()), len(old), len(new))
            for (name, content), (old, new) in zip(texts, pairs, strict=True)
        ]


def config_with(size: str, rows: int) -> dict[str, Any]:
    """config.json of a size with so many tokens; those that begin and end a text are the last."""
    raw = config_of(size)
    ids = {key: min(raw[key], rows - 1) for key in ("bos_token_id", "eos_token_id") if key in raw}
    return raw | ids | {"vocab_size": rows}


def weight_bytes(size: str, rows: int) -> float:
    """Bytes of all tensors of a packed model with so many tokens."""
    total = 0.0
    for spec in tensor_table(config_with(size, rows)):
        bits = bits_of(spec.module, BITS) + 16 / GROUP if spec.quantizable else 16
        total += math.prod(spec.shape) * bits / 8
    return total


def speeds(size: str, vocabularies: Sequence[int]) -> list[float]:
    """Tokens per second with each vocabulary, decoded in turn."""
    engines = [engine_of(config_with(size, rows), BITS, "cuda", CONTEXT) for rows in vocabularies]
    rounds = [
        [1e6 / statistics.median(captured_us(engine, GREEDY)) for engine in engines]
        for _ in range(ROUNDS)
    ]
    return [statistics.median(each) for each in zip(*rounds, strict=True)]


def read_texts(
    ctx: click.Context, param: click.Parameter, values: Sequence[str]
) -> list[tuple[str, str]]:
    """Names and contents of NAME=FILE."""
    texts = []
    for value in values:
        name, _, file = value.partition("=")
        if not name or not Path(file).is_file():
            raise click.BadParameter(f"{value!r} is not NAME=FILE.")
        content = Path(file).read_text(encoding="utf-8")
        if not content:
            raise click.BadParameter(f"`{file}` is empty.")
        texts.append((name, content))
    return texts


@click.command()
@click.argument("size", type=click.Choice([*SIZES, *HYBRID_SIZES]))
@click.argument("tokenizer", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--keep", default=65_536, show_default=True, help="Tokens of the smaller one.")
@click.option(
    "--text",
    "more",
    metavar="NAME=FILE",
    multiple=True,
    callback=read_texts,
    help="More texts to count.",
)
@click.option(
    "--vocabulary-text",
    "counted",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Whose tokens are kept; default: the bundled text.",
)
@click.option("--no-speed", is_flag=True, help="Count tokens alone, without a GPU.")
def main(
    size: str,
    tokenizer: Path,
    keep: int,
    more: list[tuple[str, str]],
    counted: Path | None,
    no_speed: bool,
) -> None:
    """Compare vocabularies of a model of SIZE with the TOKENIZER of a folder."""
    if not no_speed and not torch.cuda.is_available():
        raise SystemExit("bench_vocabulary needs an NVIDIA GPU")
    texts = [(text.title, text.content) for text in vocabulary_texts()] + more
    whole = config_of(size)["vocab_size"]
    rows, lengths = count_both(tokenizer, whole, keep, counted, texts)
    heads = [f"{whole:,} rows", f"{rows:,} rows", "change"]
    rates = None if no_speed else speeds(size, (whole, rows))
    table = plain_table("", (f"{size} INT4",), heads)

    def add(name: str, before: float, after: float, form: str) -> None:
        table.add_row(name, format(before, form), format(after, form), f"{after / before - 1:+.1%}")

    add("weights, MB", weight_bytes(size, whole) / 1e6, weight_bytes(size, rows) / 1e6, ",.0f")
    if rates is not None:
        add("tokens/s", rates[0], rates[1], ",.0f")
    for each in lengths:
        a_token = each.size_bytes / each.whole, each.size_bytes / each.cut
        add(f"{each.name}: bytes/token", a_token[0], a_token[1], ".2f")
        if rates is not None:
            add(f"{each.name}: bytes/s", rates[0] * a_token[0], rates[1] * a_token[1], ",.0f")
    results().print(table)


if __name__ == "__main__":
    main()
