"""Gain of calibration at 2, 3, 4 and 8 bits: cosines and KL of a model packed by each method.

python examples/bits_table.py
python examples/bits_table.py MODEL --methods rtn,gptq --bits 3 --calib FILE -- --group-size 64

Every linear of the layers gets the same bits, the head stays as it is. Prints the table, and the
same in Markdown.
"""

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from lowbit.convert.cli.main import main as lowbit_convert
from lowbit.convert.report import formatting
from lowbit.convert.report.comparison import FolderRow, compare
from lowbit.convert.report.comparison_page import difference_text, perplexity_text
from lowbit.formats.printable import printable
from lowbit.formats.shell.tables import plain_table, results

HERE = Path(__file__).parent
TEXT = ("bits", "method")
FIGURES = (
    "bits/weight",
    "weight cosine",
    "logit cosine",
    "mean KL",
    "to the first",
    "perplexity",
)

PLAIN = ("rtn", "absmax")  # methods that see no text


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = HERE / "models" / "tiny-qwen3"
    parser.add_argument("model", nargs="?", type=Path, default=model, help="folder or Hub id")
    parser.add_argument("--methods", default="rtn,absmax", help="of lowbit-convert, comma between")
    parser.add_argument("--bits", default="2,3,4,8", help="of the layers' linears, comma between")
    parser.add_argument(
        "--eval-text", type=Path, default=HERE / "data" / "stories-eval.txt", metavar="FILE"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the packed folders here")
    parser.add_argument("--calib", metavar="FILE", help="text of calibrated methods")
    # argparse of Python 3.11 does not find an optional MODEL before `--`.
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:end])
    given.options = words[end + 1 :]
    return given


def pack(
    model: Path, out: Path, bits: str, method: str, text: Path, options: Sequence[str]
) -> None:
    """Convert and measure."""
    command = ["quantize", str(model), str(out), "--method", method, "--overwrite", "--json"]
    command += ["--bits", f"*.layers.*={bits}", "--lm-head", "bf16"]
    command += ["--report", "--eval-text", str(text), *options]
    with contextlib.redirect_stdout(io.StringIO()):
        lowbit_convert.main(command, standalone_mode=False)


def cells(bits: str, row: FolderRow) -> tuple[str, ...]:
    return (
        f"INT{bits}",
        row.method,
        f"{row.bits_per_weight:.2f}",
        formatting.MISSING if row.weight_cosine is None else formatting.cosine(row.weight_cosine),
        formatting.cosine(row.logit_cosine),
        formatting.kl(row.kl_mean),
        difference_text(row),
        perplexity_text(row),
    )


def measure(given: argparse.Namespace, folder: Path) -> list[tuple[str, ...]]:
    """The rows of the table, converted in `folder`."""
    progress = Console(stderr=True)
    table: list[tuple[str, ...]] = []
    for bits in given.bits.split(","):
        folders = []
        for method in given.methods.split(","):
            progress.print(f"INT{bits} {method}", style="dim")
            folders.append(folder / f"{method}-int{bits}")
            text = () if given.calib is None or method in PLAIN else ("--calib", given.calib)
            options = (*given.options, *text)
            pack(given.model, folders[-1], bits, method, given.eval_text, options)
        table += [cells(bits, row) for row in compare(folders).rows]
    return table


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], text: int = len(TEXT)) -> str:
    """A Markdown table: `text` columns of words, then right-aligned columns of figures."""
    rule = ["---"] * text + ["--:"] * (len(headings) - text)
    cells = ([printable(value).replace("|", "\\|") for value in row] for row in rows)
    lines = [headings, rule, *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    given = parse()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            rows = measure(given, given.keep or Path(temporary))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    table = plain_table("", TEXT, FIGURES)
    for row in rows:
        table.add_row(*row)
    results().print(table)
    print(markdown((*TEXT, *FIGURES), rows))


if __name__ == "__main__":
    main()
