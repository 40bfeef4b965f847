"""Results on stdout, everything else on stderr."""

import json
import os
import re
import sys
from typing import IO, Any

import click

from lowbit.formats.layout.records import finite
from lowbit.formats.printable import printable

SCHEMA = 1  # version of every object that --json prints
# Blanks and a word; a command in backticks is one, so that it can be copied.
WORD = re.compile(r"([^\S\n]*)((?:`[^`\n]*`|\S)+)")
GAP = re.compile(r"\s*\S.*?\s{2,}(?=\S)")


def print_json(content: dict[str, Any]) -> None:
    """Print an object as one line on stdout; figures that are not finite are null."""
    click.echo(json_line(content, sys.stdout.encoding or "utf-8"))


def json_line(content: dict[str, Any], encoding: str = "utf-8") -> str:
    """An object as one line of JSON with the schema's version, without a line end."""
    whole = finite({"schema": SCHEMA, **content})
    text = json.dumps(whole, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:  # it lacks a character, or a file name has half a surrogate pair
        text = json.dumps(whole, allow_nan=False)
    return text


def note(text: str, fold: bool = True) -> None:
    """Print a dim line on stderr, above progress bars where there are any.

    Args:
        fold: False for a command, which is copied as one line.
    """
    line = printable(text)
    if fold:
        line = folded(line, sys.stderr)
    # Bars replace sys.stderr; click's own is the file behind it, and would write into them.
    click.echo(line if plain() else click.style(line, dim=True), file=sys.stderr)


def folded(text: str, file: IO[str]) -> str:
    """Text with line ends between words where a terminal would break them; a pipe gets it as is."""
    width = _columns(file)
    return text if width is None else "\n".join(_fold(line, width) for line in text.split("\n"))


def _columns(file: IO[str]) -> int | None:
    """Width of a terminal; None for anything else."""
    if not file.isatty():
        return None
    try:
        return int(os.environ.get("COLUMNS", "")) or None
    except ValueError:
        pass
    try:
        return os.get_terminal_size(file.fileno()).columns or None
    except OSError:  # a file that only says that it is a terminal
        return None


def _fold(line: str, width: int) -> str:
    """A line in pieces of at most `width` characters, longer only where one word is.

    What follows a gap of several blanks is a column, below which its next lines begin.
    """
    gap = GAP.match(line)
    hang = gap.end() if gap is not None and 2 * gap.end() <= width else 0
    parts: list[str] = []
    used = 0
    for blanks, word in WORD.findall(line):
        if used > hang and used + len(blanks) + len(word) > width:
            blanks, used = "\n" + " " * hang, -1
        parts += blanks, word
        used += len(blanks) + len(word)
    return "".join(parts)


def plain() -> bool:
    """Tell if the user asks for text without styles (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))
