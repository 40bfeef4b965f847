"""Times and tokens of a stream, and streams that are no answers."""

import json
from typing import Any

import pytest

from lowbit.runtime.lab.http_load.answers import (
    MOST_CHARACTERS,
    MOST_WAIT_S,
    Answered,
    AnswerTimer,
    refusal,
)
from lowbit.runtime.lab.http_load.connection import Response
from lowbit.runtime.lab.http_load.framing import UnansweredError

DONE = b"data: [DONE]\n\n"
END = {"choices": [{"text": "", "finish_reason": "stop"}]}


def event(content: Any) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


def text(word: str) -> bytes:
    return event({"choices": [{"text": word, "finish_reason": None}], "usage": None})


def usage(tokens: Any, prompt: Any = 5) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}})


def timed(*taken: tuple[float, bytes], asked_s: float = 10.0) -> Answered:
    timer = AnswerTimer()
    for at, data in taken:
        timer.take(data, at)
    return timer.answered(asked_s)


def test_times_of_a_stream() -> None:
    found = timed((10.5, text("a")), (11.5, text("b")), (13.5, text("c")), (14, usage(3) + DONE))
    assert found == Answered(
        asked_s=10.0,
        first_s=0.5,
        whole_s=3.5,
        gaps_s=(1.0, 2.0),
        tokens=3,
        prompt_tokens=5,
        by_usage=True,
    )
    assert (found.between_tokens_s, found.ended_s) == (1.5, 13.5)


def test_tokens_that_come_in_one_event_are_counted_by_the_server() -> None:
    found = timed((11, text("a")), (14, text("b c d e f")), (14, event(END) + usage(7) + DONE))
    assert (found.tokens, found.gaps_s, found.between_tokens_s) == (7, (3.0,), 0.5)


def test_events_that_come_together_have_one_time() -> None:
    found = timed((11, text("a")), (12, text("b") + text("c")), (12, event(END)))
    assert found.gaps_s == (1.0, 0.0)


def test_without_usage_an_event_is_a_token() -> None:
    for told in (b"", usage(None, None), usage(-1, "5"), usage(True, 1.5), usage("3", [])):
        found = timed((11, text("a")), (12, text("b")), (13, told + event(END)))
        assert (found.tokens, found.by_usage, found.prompt_tokens) == (2, False, None)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"reasoning_content": "a", "content": None},
        {"reasoning": "a"},
        {"tool_calls": [{"index": 0}]},
    ],
)
def test_pieces_of_a_chat(delta: dict[str, Any]) -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    piece = event({"choices": [{"delta": delta}]})
    found = timed((10.25, role), (11, piece), (12, piece + event(END)))
    assert (found.first_s, found.gaps_s) == (1.0, (1.0,))


def test_tokens_without_text_come_with_the_last_event() -> None:
    found = timed((12, event(END)), (13, usage(4) + DONE))
    assert (found.first_s, found.whole_s, found.gaps_s, found.tokens) == (3.0, 3.0, (), 4)


def test_one_token_has_no_time_between_tokens() -> None:
    assert timed((11, text("a")), (11, usage(1) + DONE)).between_tokens_s is None


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "no stream"),
        (b'{"choices": [{"text": "not streamed"}]}', "no stream"),
        (text("a"), "closed early"),
        (text("a") + b"data: {\n\n", "no event of the API"),
        (text("a") + b"data: 17\n\n", "no event of the API"),
        (text("a") + b"data: " + b"[" * 100_000 + b"\n\n", "no event of the API"),
        (text("a") + event({"error": {"message": "it broke"}}), "error in the stream: it broke"),
        (event({"object": "error", "message": "it broke"}), "error in the stream: it broke"),
        (event({"error": "it broke"}), "error in the stream: it broke"),
        (event(END) + usage(0) + DONE, "empty answer"),
        (event({"choices": None}) + event(END), "empty answer"),
        (event({"choices": [None, 3, {"delta": [1]}]}) + event(END), "empty answer"),
    ],
)
def test_streams_that_are_no_answers(data: bytes, kind: str) -> None:
    with pytest.raises(UnansweredError, match=kind):
        timed((11, data))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too much", "type": "x"}}', "too much"),
        (b'{"error": "too much"}', "too much"),
        (b'{"object": "error", "message": "too much"}', "too much"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc": ["body"]}]'),
        (b"<html>too much</html>\n", "<html>too much</html>"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b'{"error": "%s"}' % (b"x" * 9999), "x" * MOST_CHARACTERS),
        (b"x" * 9999, "x" * MOST_CHARACTERS),
    ],
)
def test_message_of_a_refusal(body: bytes, message: str) -> None:
    found = refusal(Response(429, {}, body))
    assert (found.kind, found.status) == ("status 429", 429)
    assert str(found) == f"status 429: {message}"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), ("99999", MOST_WAIT_S), ("", 0.0), ("-1", 0.0), ("nan", 0.0), ("²", 0.0)],
)
def test_retry_after(value: str, seconds: float) -> None:
    assert refusal(Response(503, {"retry-after": value}, b"")).retry_after_s == seconds


def test_retry_after_that_is_a_date() -> None:
    headers = {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}
    assert refusal(Response(429, headers, b"")).retry_after_s == 0.0
