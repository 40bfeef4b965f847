"""Pages from templates: one file each, style inlined, every value escaped."""

import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lowbit.convert.report import words
from lowbit.convert.report.verdict import scheme_text


def render_page(template: str, **values: Any) -> str:
    """A page; values are escaped, except charts, which come as `Markup`."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
    )
    environment.filters.update(
        percent=words.percent,
        signed=words.signed,
        number=words.number,
        perplexity=words.perplexity,
        kl=words.kl,
        cosine=words.cosine,
        decibels=words.decibels,
        size=words.size,
        passage=words.passage,
        token=words.token,
        sentence=words.sentence,
        tight=words.tight,
        share=share,
        scheme=scheme_text,
    )
    return environment.get_template(template).render(**values).lstrip()


def share(value: float, whole: float) -> float:
    """A part of a whole as a number from 0 to 1, whatever the figures are."""
    if not whole > 0 or math.isnan(value):
        return 0.0
    if math.isinf(whole):
        return 1.0 if math.isinf(value) else 0.0
    return min(1.0, max(0.0, value / whole))
