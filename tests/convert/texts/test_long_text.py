"""Long windows: what is repeated and what is looked up stands where it is said to stand."""

import re
from pathlib import Path

import pytest

from lowbit.convert.texts.evaluation import Text
from lowbit.convert.texts.long import LEAST, LongText, long_text
from lowbit.formats.errors import RequestError
from lowbit.formats.text.tokenizer import load_text_tokenizer

TOLD = re.compile(r"The colors of (\w+) are((?: \w+){4})\.")


@pytest.fixture(scope="module")
def made(tiny: Path, stories: str) -> LongText:
    return long_text(tiny, Text("stories", "stories", stories), 2048)


def test_passages_come_twice(made: LongText) -> None:
    assert made.length == 2048
    assert made.repeated.shape == (2, 2048)
    assert (made.repeated[:, :1024] == made.repeated[:, 1024:]).all()
    assert (made.repeated[0] != made.repeated[1]).any()


def test_lines_come_twice_and_only_the_first_time_tells(made: LongText, tiny: Path) -> None:
    tokenizer = load_text_tokenizer(tiny)
    assert made.searched.shape == (4, 2048)
    assert len(made.lookups) == 4 * 8
    for number, window in enumerate(made.searched.tolist()):
        told = TOLD.findall(tokenizer.decode(window))
        assert len(told) == 16
        assert told[:8] == told[8:]
        assert len({name for name, _ in told}) == len({colors for _, colors in told}) == 8
        lookups = [lookup for lookup in made.lookups if lookup.window == number]
        for lookup, (_, colors) in zip(lookups, told, strict=False):
            answer, back = lookup.answer, lookup.distance
            found = window[answer]
            assert found == window[answer.start - back : answer.stop - back]
            assert tokenizer.decode(found) == colors
            assert tokenizer.decode(window[: answer.start]).endswith(" are")
        distances = [lookup.distance for lookup in lookups]
        assert distances == sorted(distances, reverse=True)
        assert distances[0] > 0.9 * 2048
        assert distances[-1] > 0.1 * 2048


@pytest.mark.parametrize(("context", "length"), [(1501, 1500), (LEAST, LEAST), (10**6, 32_768)])
def test_windows_end_where_context_and_limit_do(
    tiny: Path, stories: str, context: int, length: int
) -> None:
    story = stories * 3 if context > 10_000 else stories[:30_000]
    made = long_text(tiny, Text("stories", "stories", story), context)
    assert made.length == made.searched.shape[1] == length


def test_windows_end_where_the_text_does(tiny: Path, stories: str) -> None:
    made = long_text(tiny, Text("stories", "stories", stories[:6000]), 4096)
    count = len(load_text_tokenizer(tiny).encode(stories[:6000]))
    assert made.length == count // 2 * 2 < 4096
    assert len(made.searched) == 1


def test_too_little_is_refused(tiny: Path, stories: str) -> None:
    with pytest.raises(RequestError, match="the model has 1023 positions") as caught:
        long_text(tiny, Text("stories", "stories", stories), LEAST - 1)
    assert caught.value.hint == "leave out --long"
    with pytest.raises(RequestError, match=r"`a[.]txt` 2 tokens") as caught:
        long_text(tiny, Text("a.txt", "a", " the dog"), 4096)
    assert caught.value.hint == "give a longer --eval-text"
