"""Conversions as most tests want them: by the public function, without the files of a report."""

import shutil
from pathlib import Path
from typing import Any

import lowbit.convert
from lowbit.convert import Conversion, Recipe, Request
from lowbit.convert.original.progress import Note, Progress, silent, unsaid
from tests.convert.fixture_types import MakeModel

STORY = "Once upon a time there was a little robot who lived in a big house. "


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


def model_beside_story(folder: Path, make_model: MakeModel, tiny: Path, times: int) -> Path:
    """A model of one layer with the tokenizer of `tiny`, and `story.txt` beside it to calibrate by.

    times: that the story is told.
    """
    made = make_model(folder / "source", num_hidden_layers=1, vocab_size=4096)
    shutil.copy(tiny / "tokenizer.json", made)
    (folder / "story.txt").write_text(STORY * times)
    return made
