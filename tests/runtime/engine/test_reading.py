"""The bundled model with a trained vision tower reads words and numbers of 12 px it never saw.

Colors and shapes would prove nothing: a tower with a wrong rotation still tells them apart. Of
all 100 it read 14 where rows and columns of its rotation were swapped, 13 where patches came in
another order; of 40 that are resized 18, not 37, without interpolation. It hardly notices other
positions of image tokens in the decoder, nor small errors of learned positions: those are compared
with transformers' in test_images.py and tests/runtime/models/test_vision.py.
"""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import lowbit.runtime as lowbit
from lowbit.formats.layout.recipes import Base
from lowbit.runtime.engine.stats import Tally
from tests.lanes import in_commands
from tests.reading import (
    FOLDER,
    GREEDY,
    asked,
    chart,
    exact,
    framed,
    pictures,
    read,
    row,
    words,
)

COUNT = 16  # of the 100 pictures
ENOUGH = 15
SOME = slice(None, None, 8)
NOUNS = ("maple", "stone", "brick", "cloud", "tiger", "piano", "lemon", "night", "quart", "horse")

Load = Callable[..., lowbit.Model]
Together = Callable[[Base | None], list[str]]


@pytest.fixture(scope="module")
def load() -> Load:
    """A model on the CPU, loaded once for each set of options."""

    @cache
    def made(recipe: Base | None = None, **options: Any) -> lowbit.Model:
        sizes = {"context": 256, "max_sequences": 32} | options
        return lowbit.load(FOLDER, device="cpu", quantize=recipe, **sizes)

    return made


@pytest.fixture(scope="module")
def together(load: Load) -> Together:
    """Answers about COUNT pictures, once for each recipe."""

    @cache
    def found(recipe: Base | None) -> list[str]:
        return read(load(recipe), pictures()[:COUNT])

    return found


@in_commands("int8", "None")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, "int8", "int4"])
def test_unseen_words_and_numbers_are_read(recipe: Base | None, together: Together) -> None:
    assert exact(together(recipe), words()[:COUNT]) >= ENOUGH


@in_commands("int8")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, "int8", "int4"])
def test_alone_they_are_read_as_in_company(
    recipe: Base | None, load: Load, together: Together
) -> None:
    expected = together(recipe)[SOME]
    load(recipe).engine.forget()
    assert [read(load(recipe), [each])[0] for each in pictures()[:COUNT][SOME]] == expected


@in_commands("ngram")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mtp", "ngram"])
def test_drafts_change_no_letter(mode: str, load: Load, together: Together) -> None:
    assert read(load(speculate=mode), pictures()[:5]) == together(None)[:5]


def test_the_head_drafts_what_it_sees(load: Load) -> None:
    model, tally = load(speculate="mtp"), Tally()
    for picture in pictures()[:5]:
        made = model.encode_prompt(asked(picture), None)
        request = model.request(made.ids, sampling=GREEDY, images=made.images)
        handle = model.engine.submit(request)
        handle.result()
        tally.add(handle.tally)
    assert tally.drafted[0] > 10
    assert tally.accepted[0] > 0.9 * tally.drafted[0]


@pytest.mark.commands  # `test_images` has pictures that are kept
def test_kept_pictures_are_read_again_and_never_taken_for_others(load: Load) -> None:
    """All prompts have the same tokens, so that only the pictures tell them apart."""
    model = load()
    prompts = [asked(framed(each, 256, 256)) for each in pictures()[:8]]
    ids = [model.encode_prompt(each, None).ids for each in prompts]
    assert len({tuple(each) for each in ids}) == 1

    def answers(*chosen: int) -> list[tuple[str, bool]]:
        """Answers, and whether most of a prompt came from the cache."""
        asking = [prompts[n] for n in chosen]
        found = model.generate(asking, sampling=GREEDY, max_new_tokens=10)
        return [(each.text, each.timings.reused_tokens > 64) for each in found]

    chosen = 5, 3, 4, 0, 1, 2
    read_first = dict(zip(chosen, (text for text, _ in answers(*chosen)), strict=True))
    # A letter may be misread in the numbers of one processor and not of another.
    assert exact([read_first[n] for n in sorted(chosen)], words()[:6]) >= 5
    model.engine.forget()
    assert answers(0, 1, 2, 3) == [(read_first[n], False) for n in range(4)]
    assert answers(*chosen) == [(read_first[n], n < 4) for n in chosen]
    model.engine.forget()
    assert answers(3, 0) == [(read_first[3], False), (read_first[0], False)]


@in_commands("133-67")
@pytest.mark.parametrize(("width", "height"), [(133, 67), (140, 73)])
def test_pictures_that_must_be_resized_are_read(width: int, height: int, load: Load) -> None:
    shown = [framed(each, width, height) for each in pictures()[:12]]
    assert exact(read(load(), shown), words()[:12]) >= 11


@pytest.mark.commands
def test_of_two_words_the_one_that_is_not_named_is_read(load: Load) -> None:
    pairs = list(zip(NOUNS[::2], NOUNS[1::2], strict=True))
    shown = [row(each) for each in pairs] * 2
    questions = [f'Which word is left of "{right}"?' for _, right in pairs]
    questions += [f'Which word is right of "{left}"?' for left, _ in pairs]
    expected = [left for left, _ in pairs] + [right for _, right in pairs]
    assert exact(read(load(), shown, questions), expected) >= len(expected) - 1


@pytest.mark.commands
def test_charts_are_read_far_more_often_than_by_chance(load: Load) -> None:
    chance, shown, questions, expected = random.Random(6), [], [], []
    for n in range(16):
        heights, names = chance.sample(range(8, 58, 4), 4), chance.sample("ABCDEFGHKLMN", 4)
        shown.append(chart("".join(names), heights))
        questions.append(f"Which bar is {('highest', 'lowest')[n % 2]}?")
        expected.append(names[heights.index((max, min)[n % 2](heights))])
    assert exact(read(load(), shown, questions), expected) >= 10  # of 16; 4 by chance
