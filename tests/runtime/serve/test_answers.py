"""Deltas on their way to a client."""

from hypothesis import given
from hypothesis import strategies as st

from lowbit.runtime.engine.delta import AnswerToken, Delta, End
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.serve.answers import joined, joined_deltas
from lowbit.runtime.text.answer import Piece, ToolArguments, ToolCallStart

TOKEN = AnswerToken(1, TokenLogProbabilities(-1.0, ()), False)


def text(index: int, *words: str) -> Delta:
    return Delta(index, [Piece(word, False) for word in words])


def test_what_waited_becomes_one_delta_of_each_answer() -> None:
    end = Delta(0, [Piece("d", False)], cached_tokens=3, end=End("stop"))
    assert joined_deltas([text(0, "a"), text(1, "x"), text(0, "b", "c"), end]) == [
        Delta(0, [Piece(each, False) for each in "abcd"], cached_tokens=3, end=End("stop")),
        text(1, "x"),
    ]


def test_log_probabilities_keep_a_delta_of_their_own() -> None:
    scored = Delta(0, [Piece("b", False)], tokens=[TOKEN])
    prompt = Delta(0, [Piece("a", False)], prompt=(None,))
    assert joined_deltas([prompt, text(0, "c")]) == [prompt, text(0, "c")]
    assert joined_deltas([text(0, "a"), scored, scored, text(0, "c")]) == [
        *(text(0, "a"), scored, scored, text(0, "c"))
    ]


EVENTS = st.lists(
    st.one_of(
        st.builds(Piece, st.text(min_size=1, max_size=3), st.booleans()),
        st.builds(ToolCallStart, st.integers(0, 2), st.just("id"), st.just("f")),
        st.builds(ToolArguments, st.integers(0, 2), st.text(max_size=3), st.booleans()),
    ),
    max_size=4,
)


@given(st.lists(st.tuples(st.integers(0, 2), EVENTS, st.booleans()), max_size=12))
def test_no_event_is_lost_or_changes_its_place(parts: list[tuple[int, list[object], bool]]) -> None:
    deltas = [Delta(i, events, [TOKEN] if scored else []) for i, events, scored in parts]  # type: ignore[arg-type]
    found = joined_deltas(deltas)
    for index in range(3):
        before = [event for each in deltas if each.index == index for event in each.events]
        after = [event for each in found if each.index == index for event in each.events]
        assert before == after
        assert list(joined(before)) == list(joined(after))
    assert sum(len(each.tokens) for each in found) == sum(len(each.tokens) for each in deltas)
