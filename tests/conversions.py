"""Conversions as most tests want them: by the public function, without the files of a report."""

from pathlib import Path
from typing import Any

import lowbit.convert
from lowbit.convert import Conversion, Recipe, Request
from lowbit.convert.original.progress import Note, Progress, silent, unsaid


def convert(
    source: str | Path,
    out: str | Path,
    recipe: Recipe = Recipe(method=None),  # noqa: B008 - frozen
    *,
    progress: Progress = silent,
    note: Note = unsaid,
    **settings: Any,
) -> Conversion:
    """Convert by a recipe, its own bits, and other settings of a `Request`."""
    request = Request(recipe, **{"effort": None, **settings})
    found = lowbit.convert.convert(source, out, request, on_progress=progress, note=note)
    return found.conversion
