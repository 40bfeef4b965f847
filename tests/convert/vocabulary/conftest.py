"""The bundled texts are cut: counting all of their tokens takes most of a cut's time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lowbit.convert.texts import calibration, evaluation, token_counts
from lowbit.convert.vocabulary import cut, languages
from tests.short_models import WHOLE_VOCABULARY, Shorten

COUNTED = 20_000  # characters of each calibration text
WORDS = 500  # characters of each language's words
COMPARED = 3_000  # of each text whose tokens are counted before and after


@pytest.fixture(scope="module", autouse=True)
def _short_texts() -> Iterator[None]:
    texts = [text[:COUNTED] for text in calibration.bundled_texts()]
    compared = tuple(
        evaluation.Text(each.name, each.title, each.content[:COMPARED])
        for each in evaluation.vocabulary_texts()
    )
    words = {name: text[:WORDS] for name, text in languages.bundled_words().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(languages, "bundled_words", lambda: words)
        patch.setattr(token_counts, "bundled_texts", lambda: texts)
        for module in (evaluation, cut):
            patch.setattr(module, "vocabulary_texts", lambda: compared)
        yield


@pytest.fixture(scope="session")
def short_hybrid(shorten: Shorten) -> Path:
    """The bundled Qwen3.5 with one layer of each kind and all of its tokens."""
    return shorten("tiny-qwen3.5", WHOLE_VOCABULARY)
