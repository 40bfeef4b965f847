"""The bundled model reads unseen words on a GPU as on a CPU."""

from typing import Any

import pytest

import lowbit.runtime as lowbit
from lowbit.formats.layout.recipes import Base
from lowbit.runtime.engine.load_options import Mode
from tests.reading import FOLDER, exact, framed, pictures, read, words

pytestmark = pytest.mark.gpu

ENOUGH = 95  # of 100


@pytest.mark.parametrize("recipe", [None, "int8", "int4"])
def test_unseen_words_and_numbers_are_read(recipe: Base | None) -> None:
    model = lowbit.load(FOLDER, device="cuda", quantize=recipe, context=256, max_sequences=16)
    found = read(model, pictures())
    assert exact(found, words()) >= ENOUGH
    model.engine.forget()
    assert [read(model, [each])[0] for each in pictures()[::15]] == found[::15]


@pytest.mark.parametrize("mode", ["mtp", "ngram"])
def test_drafts_change_no_letter(mode: Mode) -> None:
    options: Any = {"device": "cuda", "context": 256, "max_sequences": 16}
    plain, drafted = (lowbit.load(FOLDER, speculate=each, **options) for each in ("off", mode))
    assert read(drafted, pictures()) == read(plain, pictures())


def test_pictures_of_other_sizes_are_read_and_kept() -> None:
    model = lowbit.load(FOLDER, device="cuda", context=512, max_sequences=8)
    for width, height in ((133, 67), (192, 96), (256, 256)):
        shown = [framed(each, width, height) for each in pictures()[:16]]
        found = read(model, shown)
        assert exact(found, words()[:16]) >= 14
        assert read(model, shown[::-1]) == found[::-1]
