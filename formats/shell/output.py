"""Results on stdout, everything else on stderr."""

import json
import math
import os
import sys
from typing import Any

import click

from lowbit.formats.printable import printable

SCHEMA = 1  # version of every object that --json prints


def print_json(content: dict[str, Any]) -> None:
    """Print an object as one line on stdout; figures that are not finite are null."""
    click.echo(json_line(content, sys.stdout.encoding or "utf-8"))


def json_line(content: dict[str, Any], encoding: str = "utf-8") -> str:
    """An object as one line of JSON with the schema's version, without a line end."""
    whole = _finite({"schema": SCHEMA, **content})
    text = json.dumps(whole, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:  # it lacks a character, or a file name has half a surrogate pair
        text = json.dumps(whole, allow_nan=False)
    return text


def note(text: str) -> None:
    """Print a dim line on stderr, above progress bars where there are any."""
    line = printable(text)
    click.echo(line if plain() else click.style(line, dim=True), err=True)


def plain() -> bool:
    """Tell if the user asks for text without styles (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
