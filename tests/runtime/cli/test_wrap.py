"""Words wrapped as they come, against a reading of the whole text."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcswidth

from lowbit.runtime.cli.answer import Wrapper

LATIN = st.sampled_from(["a", "story", "of,", "some-one", "naïve", "e\u0301tude", "x" * 12])
EMOJI = ("👩\u200d👩\u200d👧", "🇩🇪", "👍🏽", "\u2764\ufe0f")
WIDE = st.sampled_from(["中文", "汉字。", "ひらがな", "「はい」", "한국어", *EMOJI])
GAPS = st.sampled_from([" ", " ", " ", "  ", "\n", "\n\n"])
PROSE = st.lists(st.tuples(LATIN | WIDE, GAPS)).map(lambda rows: "".join(a + b for a, b in rows))
CUTS = st.lists(st.integers(1, 9), min_size=1)


def pieces(text: str, cuts: list[int]) -> Iterator[str]:
    """A text in pieces of these lengths, over and over."""
    start = index = 0
    while start < len(text):
        yield text[start : start + cuts[index % len(cuts)]]
        start, index = start + cuts[index % len(cuts)], index + 1


def wrapped(text: str, width: int, cuts: list[int] | None = None) -> str:
    wrapper = Wrapper(lambda: width)
    return "".join(map(wrapper.push, pieces(text, cuts or [1]))) + wrapper.finish()


@given(PROSE, st.integers(2, 40), CUTS)
def test_breaks_are_all_that_is_added_and_spaces_all_that_is_taken(
    text: str, width: int, cuts: list[int]
) -> None:
    shown = wrapped(text, width, cuts)
    place = 0
    for character in shown:
        if place < len(text) and character == text[place]:
            place += 1
        else:
            assert character == "\n"  # a break, where the spaces of the text were left out
            while place < len(text) and text[place] == " ":
                place += 1
    assert not text[place:].strip(" ")
    assert shown == wrapped(text, width, [len(text) or 1])  # however the pieces come


@given(PROSE, st.integers(12, 40))
def test_no_line_is_wider_than_the_terminal(text: str, width: int) -> None:
    for line in wrapped(text, width).split("\n"):
        assert wcswidth(line.rstrip(" ")) <= width


@given(st.lists(LATIN | GAPS).map("".join), st.integers(2, 11))
def test_only_words_wider_than_the_terminal_are_torn_by_it(text: str, width: int) -> None:
    for line in wrapped(text, width).split("\n"):
        for word in re.finditer("[^ ]+", line):
            start = wcswidth(line[: word.start()])
            last = start + wcswidth(word[0]) - 1
            if wcswidth(word[0]) <= width and line[: word.start()].strip():
                assert start // width == last // width


@given(st.lists(LATIN | GAPS).map("".join), st.integers(2, 40))
def test_lines_are_as_full_as_a_greedy_reader_makes_them(text: str, width: int) -> None:
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in unspaced(paragraph):
            if line.strip() and wcswidth(line + word) > width:
                lines.append(line)
                line = word.lstrip(" ")
            else:
                line += word
        lines.append(line)
    if any(wcswidth(line.rstrip(" ")) > width for line in lines):
        return  # the terminal breaks such words, and more fits behind them
    assert [line.rstrip(" ") for line in wrapped(text, width).split("\n")] == [
        line.rstrip(" ") for line in lines
    ]


def unspaced(paragraph: str) -> Iterator[str]:
    """Words, each with the spaces before it."""
    gap = ""
    word = ""
    for character in paragraph:
        if character == " ":
            if word:
                yield gap + word
                gap = word = ""
            gap += " "
        else:
            word += character
    if word:
        yield gap + word


@given(st.lists(st.sampled_from(["漢", "字", "。", "、", "「", "」", "仮", "a"])).map("".join))
def test_chinese_and_japanese_break_anywhere_but_at_punctuation(text: str) -> None:
    lines = wrapped(text, 8).split("\n")
    assert "".join(lines) == text
    for line in lines[1:]:
        assert line[0] not in "。、」"
    for line in lines[:-1]:
        assert line[-1] != "「"


@given(st.lists(st.sampled_from([*EMOJI, "a", "漢", " "])).map("".join), st.integers(2, 20))
def test_no_emoji_is_torn(text: str, width: int) -> None:
    whole = re.compile(f"(?:{'|'.join(EMOJI)}|[a漢 ])*")
    for line in wrapped(text, width).split("\n"):
        assert whole.fullmatch(line)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint('a line of code that is long')\n```\n",
        "~~~\n    indented and longer than the line\n~~~\n",
        "| a | table | whose rows | are long |\n|---|---|---|---|\n",
        "https://example.com/a/long/address/that/stays/whole\n",
        "short\n\n  indented\nlines \n",
        "    \n",
        "\ttab\n",
        "",
    ],
)
def test_code_tables_addresses_and_short_lines_stay(text: str) -> None:
    assert wrapped(text, 16) == text


def test_words_wrap_again_after_the_code() -> None:
    text = "```\nlong line of code here\n```\nand then some prose"
    assert wrapped(text, 10) == "```\nlong line of code here\n```\nand then\nsome prose"


def test_a_word_is_shown_when_its_end_comes_and_an_endless_one_before() -> None:
    wrapper = Wrapper(lambda: 10)
    assert [wrapper.push(text) for text in ("On", "ce", " upon", " a")] == ["", "", "Once", " upon"]
    assert wrapper.push("x" * 30)
    assert wrapper.finish()


def test_a_resized_terminal_is_seen_at_the_next_line() -> None:
    width = 10
    wrapper = Wrapper(lambda: width)
    shown = wrapper.push("one two three ")
    width = 5
    shown += wrapper.push("four five six ") + wrapper.finish()
    assert shown == "one two\nthree four\nfive\nsix "
