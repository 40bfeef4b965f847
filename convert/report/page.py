"""Pages from templates: one file each with its style inside, and every value escaped."""

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lowbit.convert.report import formatting
from lowbit.convert.report.linears import scheme_text
from lowbit.formats.printable import printable

# Words that no line may end in, although browsers end lines at hyphens: options and commands.
WHOLE = re.compile(r"(?<![\w-])(?:--[a-z][a-z0-9-]{0,38}[a-z0-9]|lowbit-(?:convert|run))(?![\w-])")
TAG = re.compile(r"(<[^>]*>)")
NO_PROSE = ("style", "svg", "title")  # elements whose text takes no tags


def render_page(template: str, **values: Any) -> str:
    """Render a page; values are escaped, except charts, which are `Markup`.

    Control characters and lone surrogates, which no page may hold, are shown as escapes. Options
    and the names of commands are never broken over two lines.
    """
    return _unbroken(environment().get_template(template).render(**values).lstrip())


def _unbroken(page: str) -> str:
    """A page with every option and command of its text in an element that is not broken."""
    parts, inside = TAG.split(page), 0
    for number, part in enumerate(parts):
        if number % 2:  # a tag
            name = part.strip("</>").partition(" ")[0]
            if name in NO_PROSE and not part.endswith("/>"):
                inside += -1 if part.startswith("</") else 1
        elif not inside:
            parts[number] = WHOLE.sub(r'<span class="w">\g<0></span>', part)
    return "".join(parts)


@cache
def environment(markdown: bool = False) -> Environment:
    """The templates, compiled once; values in Markdown are made safe by filters, not escaped."""
    made = Environment(
        autoescape=not markdown,
        undefined=StrictUndefined,
        finalize=None if markdown else _printable,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=markdown,
        loader=FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
    )
    same = "percent signed number perplexity kl cosine count bits size passage token sentence "
    same += "tight metric score score_change"
    made.filters.update({name: getattr(formatting, name) for name in same.split()})
    made.filters.update(
        kl_text=lambda part: formatting.kl_with_error(part.kl_mean, part.kl_error),
        added_text=formatting.added,
        share=share,
        scheme=scheme_text,
        md=_markdown,
        code=_code,
    )
    return made


def _markdown(value: str) -> str:
    """Text without the characters that Markdown reads as a table, a tag or a code span."""
    return re.sub(r"[`|<>\[\]\r\n\t]", " ", value).strip()


def _code(value: str) -> str:
    """Text on one line, without the mark that ends a fenced block."""
    return re.sub(r"[`\r\n\t]", " ", value).strip()


def _printable(value: Any) -> Any:
    """A value with control characters other than line ends shown as escapes."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return printable(value, keep="\n")


def share(value: float, whole: float) -> float:
    """A part of a whole as a number from 0 to 1; 0 without a whole."""
    if not whole > 0 or math.isnan(value):
        return 0.0
    if math.isinf(whole):
        return 1.0 if math.isinf(value) else 0.0
    return min(1.0, max(0.0, value / whole))
