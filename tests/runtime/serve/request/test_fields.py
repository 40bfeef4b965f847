"""Bodies as schemas see them: what costs more when it is wrong, and what says nothing."""

import json
from collections.abc import Iterator
from typing import Any

import pydantic_core
import pytest

from lowbit.runtime.serve.apis.chat import ChatBody
from lowbit.runtime.serve.apis.completions import CompletionBody
from lowbit.runtime.serve.apis.messages import MessagesBody
from lowbit.runtime.serve.apis.responses import ResponsesBody
from lowbit.runtime.serve.apis.tokens import DetokenizeBody
from lowbit.runtime.serve.app import BODIES
from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.request.body import MEANT, MOST_LEFT_OUT, ModelBody
from lowbit.runtime.serve.request.explain import explained
from lowbit.runtime.serve.request.forms import FormatFields
from lowbit.runtime.serve.request.prepare import WITH_SCHEMAS, parse

TURN = {"role": "user", "content": "Hi"}
CHAT = {"model": "m", "messages": [TURN]}
LEAST: dict[type[ModelBody], dict[str, Any]] = {
    ChatBody: CHAT,
    CompletionBody: {"model": "m", "prompt": "Hi"},
    ResponsesBody: {"model": "m", "input": "Hi"},
    MessagesBody: {**CHAT, "max_tokens": 1},
}


def parsed(schema: type[ModelBody], **changes: object) -> ModelBody:
    return parse(json.dumps(LEAST.get(schema, {}) | changes).encode(), schema)


def schemas_of(node: object, kind: str) -> Iterator[dict[str, Any]]:
    """Parts of a core schema of one type."""
    if isinstance(node, dict):
        if node.get("type") == kind:
            yield node
        for each in node.values():
            yield from schemas_of(each, kind)
    elif isinstance(node, list | tuple):
        for each in node:
            yield from schemas_of(each, kind)


@pytest.mark.parametrize("schema", BODIES)
def test_lists_are_bounded_and_end_at_their_first_error(schema: type[ModelBody]) -> None:
    core = schema.__pydantic_core_schema__
    for each in schemas_of(core, "list"):
        assert each.get("fail_fast"), each
        assert each.get("max_length"), each
    for each in schemas_of(core, "dict"):
        assert each["values_schema"]["type"] == "any" or each.get("max_length"), each
    for each in schemas_of(core, "function-after"):  # a length that is looked at behind the items
        assert "max_length" not in str(each["function"])


@pytest.mark.parametrize(
    ("schema", "change"),
    [
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * 3000}]}),
        (ChatBody, {"logit_bias": {str(id): "x" for id in range(3000)}}),
        (ChatBody, {"stop": [1] * 3000}),
        (ChatBody, {"structured_outputs": {f"u{number}": 1 for number in range(3000)}}),
        (CompletionBody, {"prompt": [None] * 3000}),
        (CompletionBody, {"prompt": [[1] * 3000 + ["x"]]}),
        (ResponsesBody, {"input": [{}] * 3000}),
        (MessagesBody, {"messages": [{"role": "user", "content": [{}] * 3000}]}),
        (DetokenizeBody, {"tokens": ["x"] * 3000}),
    ],
)
def test_few_errors_are_collected(
    schema: type[ModelBody], change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def count(error: pydantic_core.ValidationError, content: object) -> ApiError:
        counts.append(error.error_count())
        return explained(error, content)

    monkeypatch.setattr("lowbit.runtime.serve.request.prepare.explained", count)
    with pytest.raises(ApiError):
        parsed(schema, **change)
    assert counts[0] < 10


def test_few_unknown_fields_of_a_message_are_named() -> None:
    turns = [{**TURN, **{f"u{number:04}": 1 for number in range(3000)}}, {**TURN, "u0000": 2}]
    body = parsed(ChatBody, messages=turns, mood=1)
    named = [f"field *.u{number:04}" for number in range(MOST_LEFT_OUT - 1)]
    assert body.left_out() == ["field mood", *named, f"{3001 - MOST_LEFT_OUT} more fields"]


def test_an_empty_field_of_a_message_is_not_named() -> None:
    given: dict[str, Any] = {"a": None, "b": [], "c": "", "d": {}, "index": 1, "e": False}
    assert parsed(ChatBody, messages=[{**TURN, **given}]).left_out() == ["field *.e"]


SILENT: list[tuple[str, object, object]] = [
    ("best_of", 1, 2),
    ("min_tokens", 0, 1),
    ("skip_special_tokens", True, False),
    ("use_beam_search", False, True),
    ("length_penalty", 1.0, 2),
    ("bad_words", [], ["x"]),
    ("typical_p", 1, 0.5),
    ("mirostat", 0, 1),
    ("id_slot", -1, 0),
    ("logit_bias", [], [1]),
    ("n", 1, "1"),
]


@pytest.mark.parametrize("schema", LEAST)
@pytest.mark.parametrize(("name", "neutral", "meant"), SILENT)
def test_neutral_values_are_taken_and_others_refused(
    schema: type[ModelBody], name: str, neutral: object, meant: object
) -> None:
    assert parsed(schema, **{name: neutral}).ignored() in ([], [name])
    with pytest.raises(ApiError) as error:
        parsed(schema, **{name: meant})
    assert str(error.value.param).startswith(name)


@pytest.mark.parametrize("schema", LEAST)
def test_fields_that_are_not_known_are_left_out_by_name(schema: type[ModelBody]) -> None:
    given = {"web_search_options": {"a": 1}, "mood": 1, "none": None, "empty": [], "off": False}
    body = parsed(schema, **given)
    assert body.left_out() == ["field mood", "field off", "field web_search_options"]
    assert not body.ignored()


def test_of_many_unknown_fields_some_are_named_and_the_rest_counted() -> None:
    body = parsed(ChatBody, **{f"u{number:04}": 1 for number in range(3000)})
    named = [f"field u{number:04}" for number in range(MOST_LEFT_OUT)]
    assert body.left_out() == [*named, f"{3000 - MOST_LEFT_OUT} more fields"]


SLIPS = [
    *[
        ("temperatur", "temperature"),
        ("tempperature", "temperature"),
        ("tenperature", "temperature"),
    ],
    *[("temepratures", ""), ("temeprature", "temperature"), ("Top-P", "top_p"), ("topp", "top_p")],
    *[("modle", ""), ("top_h", ""), ("temperature" * 99, "")],
]


@pytest.mark.parametrize("schema", LEAST)
@pytest.mark.parametrize(("name", "meant"), SLIPS)
@pytest.mark.parametrize("value", [0.5, 0])
def test_misspelt_fields_are_refused(
    schema: type[ModelBody], name: str, meant: str, value: float
) -> None:
    assert not parsed(schema, **{name: None}).left_out()
    if not meant:
        assert len(parsed(schema, **{name: value}).left_out()) == 1
        return
    with pytest.raises(ApiError, match=f"`{name}` is not supported; is `.*` meant") as error:
        parsed(schema, **{name: value})
    assert error.value.param == name


def test_a_name_beside_the_one_that_it_resembles_is_no_slip() -> None:
    assert parsed(ChatBody, top_p=0.5, topP=0.5).left_out() == ["field topP"]


@pytest.mark.parametrize(
    ("schema", "field", "slip", "meant"),
    [
        (ChatBody, "stream_options", "include_usages", "include_usage"),
        (ResponsesBody, "text", "fromat", "format"),
        (ResponsesBody, "reasoning", "efort", "effort"),
        (MessagesBody, "output_config", "formatt", "format"),
    ],
)
def test_misspelt_settings_are_refused(
    schema: type[ModelBody], field: str, slip: str, meant: str
) -> None:
    with pytest.raises(ApiError, match=f"`{field}`: `{slip}` is not supported; is `{meant}` meant"):
        parsed(schema, **{field: {slip: 1}})


def test_no_schema_is_prepared_where_others_wait() -> None:
    forms = FormatFields.KNOWN | {"output_config", "output_format", "text"}
    assert forms | {"tools"} <= WITH_SCHEMAS


@pytest.mark.parametrize("schema", LEAST)
def test_no_form_of_an_answer_is_left_out(schema: type[ModelBody]) -> None:
    forms = FormatFields.KNOWN | {"output_config", "output_format", "stop_sequences", "text"}
    assert forms | {"tools"} <= schema.NAMED
    assert not parsed(schema, response_format={"type": "text"}, tools=[], text={}).left_out()


@pytest.mark.parametrize("schema", LEAST)
@pytest.mark.parametrize("name", sorted(MEANT))
def test_fields_that_change_an_answer_are_not_left_out(schema: type[ModelBody], name: str) -> None:
    if name in schema.KNOWN:
        return
    with pytest.raises(ApiError, match=f"`{name}` is not supported"):
        parsed(schema, **{name: 1})
    assert not parsed(schema, **{name: None}).left_out()


@pytest.mark.parametrize("schema", LEAST)
@pytest.mark.parametrize(("name", "value"), [("keep_alive", "5m"), ("cache_prompt", True)])
def test_hints_are_ignored_by_name(schema: type[ModelBody], name: str, value: object) -> None:
    assert parsed(schema, **{name: value}).ignored() == [name]


def test_what_chats_do_anyway_may_be_said() -> None:
    said = {"echo": False, "separate_reasoning": True}
    found = parsed(ChatBody, **said, max_tokens=-1, messages=[{**TURN, "tool_calls": None}])
    assert isinstance(found, ChatBody)
    assert found.max_tokens is None
    for name in said:
        with pytest.raises(ApiError, match=f"`{name}` is not supported"):
            parsed(ChatBody, **{name: not said[name]})
    with pytest.raises(ApiError, match="is not supported"):
        parsed(ChatBody, min_tokens=False)  # not 0
