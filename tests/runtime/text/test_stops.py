"""Stop strings: the cut is the same however the text is split."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.runtime.text.stops import StopStrings


def passed(pieces: Iterable[str], *stops: str) -> list[str]:
    text = StopStrings(stops)
    return [*map(text.push, pieces), text.finish()]


def first_cut(text: str, stops: list[str]) -> str:
    """The text before whichever string is complete first, found prefix by prefix."""
    for length in range(len(text) + 1):
        found = [at for stop in stops if (at := text[:length].find(stop)) >= 0]
        if found:
            return text[: min(found)]
    return text


@given(
    pieces=st.lists(st.text(alphabet="abE\nN", max_size=6), max_size=8),
    stops=st.lists(st.text(alphabet="abEN\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_text_ends_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    text = StopStrings(tuple(stops))
    shown = "".join(map(text.push, pieces)) + text.finish()
    whole = "".join(pieces)
    assert shown == first_cut(whole, stops)
    assert text.stopped == (shown != whole)
    if text.found is not None:
        assert text.found in stops
        assert whole.startswith(shown + text.found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\nEND two", ["o", "n", "e", *[""] * 9]),
        ("one\nENTER", ["o", "n", "e", "", "", "", "\nENT", "E", "R", ""]),
        ("one\nEN", ["o", "n", "e", "", "", "", "\nEN"]),
    ],
)
def test_what_may_begin_a_stop_string_is_held_back(text: str, expected: list[str]) -> None:
    assert passed(text, "\nEND") == expected
