"""Errors of bodies: the place, the values expected and the one found, in the words of JSON."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from lowbit.runtime.serve.apis.chat import ChatBody
from lowbit.runtime.serve.apis.completions import CompletionBody
from lowbit.runtime.serve.apis.messages import MessagesBody
from lowbit.runtime.serve.apis.responses import ResponsesBody
from lowbit.runtime.serve.app import BODIES
from lowbit.runtime.serve.errors import MOST_MESSAGE, MOST_QUOTED, ApiError
from lowbit.runtime.serve.request.body import ModelBody
from lowbit.runtime.serve.request.prepare import parse
from tests.runtime.serve.request.test_fields import LEAST, TURN

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 5, 5.5, 10**400, "", "x", [], [1], [None], [[]]),
    *({}, {"type": "x"}, {"a": 1}, {"str": 1}),
]
PYTHON = re.compile(
    r"\b(dict|dictionary|tuple|list|None|True|False|bool|str|int|float|f64|[Ii]nput should|valid|"
    r"instance|model|parse)\b"
)


def refusal_of(raw: bytes, schema: type[ModelBody]) -> ApiError | None:
    try:
        parse(raw, schema)
    except ApiError as error:
        return error
    return None


def refusal(schema: type[ModelBody], **changes: object) -> ApiError:
    found = refusal_of(json.dumps(LEAST.get(schema, {}) | changes).encode(), schema)
    assert found is not None
    return found


def chat(change: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {"messages": [{**TURN, **change(value)}]}


def field(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: value}


PLACES: list[tuple[type[ModelBody], Callable[[Any], dict[str, Any]]]] = [
    *((schema, field(name)) for schema in BODIES for name in sorted(schema.KNOWN)),
    (ChatBody, lambda value: {"messages": [value]}),
    (ChatBody, chat(lambda value: {"role": value})),
    (ChatBody, chat(lambda value: {"content": value})),
    (ChatBody, chat(lambda value: {"content": [value]})),
    (ChatBody, chat(lambda value: {"content": [{"type": "text", "text": value}]})),
    (ChatBody, lambda value: {"tools": [{"type": value}]}),
    (ChatBody, lambda value: {"tools": [{"type": "function", "function": {"name": value}}]}),
    (ChatBody, lambda value: {"tool_choice": {"type": "function", "function": value}}),
    (ChatBody, lambda value: {"response_format": {"type": value}}),
    (ChatBody, lambda value: {"logit_bias": {"5": value}}),
    (ChatBody, lambda value: {"stop": ["a", value]}),
    (ResponsesBody, lambda value: {"input": [value]}),
    (ResponsesBody, lambda value: {"input": [{**TURN, "content": [value]}]}),
    (ResponsesBody, lambda value: {"text": {"format": {"type": value}}}),
    (MessagesBody, lambda value: {"messages": [{**TURN, "content": [value]}]}),
    (MessagesBody, lambda value: {"tools": [{"name": "f", "input_schema": value}]}),
    (MessagesBody, lambda value: {"tool_choice": {"type": value}}),
    (CompletionBody, lambda value: {"prompt": [value]}),
    (CompletionBody, lambda value: {"prompt": [5, value]}),
    (CompletionBody, lambda value: {"prompt": [[value]]}),
]


def test_any_value_anywhere_is_refused_in_the_words_of_json() -> None:
    """Apart from the names and values that it quotes; what is refused is a place in the body."""
    refused = 0
    for schema, body in PLACES:
        for value in VALUES:
            content = LEAST.get(schema, {}) | body(value)
            error = refusal_of(json.dumps(content).encode(), schema)
            if error is None:
                continue
            refused += 1
            own = re.sub(r'`[^`]*`|"[^"]*"', "", error.message)
            assert not PYTHON.search(own), error.message
            assert re.search("got|missing|not supported|either", own), error.message
            if error.param is not None:
                assert error.message.startswith(f"`{error.param}`")
                first = re.split(r"[.\[]", error.param)[0]
                assert first in content or f"`{first}` is missing" == error.message
    assert refused > 1500


LIMITS: list[tuple[type[ModelBody], dict[str, Any], str]] = [
    (ResponsesBody, {"input": [TURN] * 5000}, "`input` may have at most 4096 items, got 5000; "),
    (CompletionBody, {"prompt": ["x"] * 1000}, "`prompt` may have at most 128 items, got 1000; "),
    (CompletionBody, {"prompt": [[1]] * 1000}, "`prompt` may have at most 128 items, got 1000; "),
    (ChatBody, {"messages": [TURN] * 5000}, "`messages` may have at most 4096 items, got 5000; "),
    (ChatBody, {"messages": []}, "`messages` must have at least 1 item, got 0"),
    (ChatBody, {"stop": ["x" * 300]}, "`stop[0]` may have at most 256 characters, got 300"),
    (ChatBody, {"guided_regex": ""}, "`guided_regex` must have at least 1 character, got 0"),
    (ChatBody, {"n": 9}, "`n` must be at most 8, got 9"),
    (ChatBody, {"n": 0}, "`n` must be at least 1, got 0"),
    (MessagesBody, {"max_tokens": 0}, "`max_tokens` must be at least 1, got 0"),
]
KINDS: list[tuple[type[ModelBody], dict[str, Any], str]] = [
    (ChatBody, {"logit_bias": [1]}, "`logit_bias` must be an object, got an array of 1"),
    (ChatBody, {"temperature": True}, "`temperature` must be a number, got true"),
    (ChatBody, {"max_tokens": 5.5}, "`max_tokens` must be an integer, got 5.5"),
    (ChatBody, {"stream": 1}, "`stream` must be `true` or `false`, got 1"),
    (ChatBody, {"messages": [{**TURN, "content": 5}]}, "must be a string or an array, got 5"),
    (ChatBody, {"messages": [{"content": "Hi"}]}, "`messages[0].role` is missing"),
    (ChatBody, {"tool_choice": 5}, "`auto`, `none` or `required` or an object, got 5"),
    (ChatBody, {"tool_choice": "any"}, '`none` or `required` or an object, got "any"'),
    (ChatBody, {"tool_choice": {"type": "function"}}, "`tool_choice.function` is missing"),
    (ResponsesBody, {"input": 5}, "`input` must be a string or an array, got 5"),
    (ResponsesBody, {"input": {"a": 1}}, "`input` must be a string or an array, got an object"),
    (ResponsesBody, {"background": True}, "`background` must be `false`, got true"),
    (CompletionBody, {"prompt": [1, 2, "x"]}, '`prompt[2]` must be an integer, got "x"'),
    (CompletionBody, {"prompt": ["a", 5]}, "`prompt[1]` must be a string, got 5"),
    (CompletionBody, {"prompt": [None]}, "`prompt[0]` must be a string or an integer or an array"),
    (CompletionBody, {"seed": "x" * 99}, f'`seed` must be an integer, got "{"x" * 39}...'),
    (CompletionBody, {"seed": "1"}, '`seed` must be an integer, got "1"'),
    (CompletionBody, {"n": 10**99}, "got an integer of more than 36 digits"),
]


@pytest.mark.parametrize(("schema", "change", "message"), [*LIMITS, *KINDS])
def test_messages_say_what_is_expected_and_what_was_found(
    schema: type[ModelBody], change: dict[str, Any], message: str
) -> None:
    assert message in refusal(schema, **change).message


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[]", "the body must be an object, got an array of 0"),
        (b"null", "the body must be an object, got null"),
        (b"\xff", "the body is not UTF-8: byte 0 cannot be read"),
        (b'{"temperature": NaN}', "the body is not valid JSON: NaN is no number"),
        (b'{"user": -Infinity}', "the body is not valid JSON: -Infinity is no number"),
        (b'{"seed": %s}' % (b"1" * 5000), "an integer has too many digits"),
    ],
)
def test_bodies_that_are_no_json_objects(raw: bytes, message: str) -> None:
    found = refusal_of(raw, ChatBody)
    assert found is not None
    assert message in found.message


def test_long_names_and_values_are_cut() -> None:
    found = refusal(ChatBody, structured_outputs={"x" * 100_000: 1})
    name = f"structured_outputs.{'x' * MOST_QUOTED}"[:MOST_QUOTED]
    assert found.message == f"`{name}...` is not supported"
    assert found.param == f"{name}..."
    assert len(ApiError(400, "x" * 100_000).message) == MOST_MESSAGE + 3
