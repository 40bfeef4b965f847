"""Formats of answers that requests ask for."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from lowbit.runtime.serve.apis.chat import ChatBody
from lowbit.runtime.serve.apis.messages import MessagesBody
from lowbit.runtime.serve.apis.responses import ResponsesBody
from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.request.forms import (
    FlatSchemaFormat,
    JsonSchemaFormat,
    format_of,
    schema_format,
)
from lowbit.runtime.serve.request.prepare import parse


def schema_of(bound: float) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": {"type": "integer", "maximum": bound}}}


OBJECT = {"type": "object", "properties": {"schema": {"type": "integer"}}}
NAMED = {"name": "n", "strict": True}
ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"json_schema": {"schema": OBJECT}}, {"schema": OBJECT}),
    ({"json_schema": {"schema": json.dumps(OBJECT)}}, {"schema": OBJECT}),
    ({"json_schema": {**NAMED, "schema": OBJECT}}, {**NAMED, "schema": OBJECT}),
    ({"schema": OBJECT}, {"schema": OBJECT}),
    ({"schema": OBJECT, "json_schema": None, "name": "n"}, {"name": "n", "schema": OBJECT}),
    ({"json_schema": OBJECT}, {"schema": OBJECT}),
    ({"json_schema": {**NAMED, **OBJECT}}, {**NAMED, "schema": OBJECT}),
    ({"json_schema": OBJECT, **NAMED}, {**NAMED, "schema": OBJECT}),
    ({"json_schema": {"name": "m", **OBJECT}, **NAMED}, {**NAMED, "name": "m", "schema": OBJECT}),
    ({"json_schema": {"description": "d", **OBJECT}}, {"schema": {"description": "d", **OBJECT}}),
    ({"json_schema": {"anyOf": [OBJECT]}}, {"schema": {"anyOf": [OBJECT]}}),
    ({"json_schema": {"enum": [1], "schema": OBJECT}}, {}),  # which of the two is it?
    ({"json_schema": OBJECT, "schema": OBJECT}, {}),
    ({"json_schema": {"type": {"type": "string"}}}, {}),  # properties without their keyword
    ({"json_schema": {"title": "T"}}, {}),
    ({"json_schema": "{"}, {}),
    ({"json_schema": [OBJECT]}, {}),
    ({"schema": 5}, {}),
    ({"json_schema": {"name": {"type": "string"}, **OBJECT}}, {}),
    ({"json_schema": {"strict": "yes", **OBJECT}}, {}),
]


@pytest.mark.parametrize(("given", "meant"), ALIKE)
def test_a_schema_has_one_reading_or_none(given: dict[str, Any], meant: dict[str, Any]) -> None:
    """Without one it is refused."""
    for kind in (JsonSchemaFormat, FlatSchemaFormat):
        content = {"type": "json_schema", **given}
        before = json.dumps(content)
        if not meant:
            with pytest.raises(ValidationError):
                kind.model_validate(content)
        else:
            found = kind.model_validate(content)
            named = found.json_schema if isinstance(found, JsonSchemaFormat) else found
            assert named.model_dump(exclude_none=True, by_alias=True, exclude={"type"}) == meant
        assert json.dumps(content) == before


def test_a_named_format_without_a_schema_is_any_object() -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}
    found = format_of(ChatBody.read(body))
    assert found is not None
    assert found.kind == "json_object"


def test_strict_schemas_refuse_bounds_that_would_be_rounded() -> None:
    """llguidance would take 2^53 + 4 under a maximum of 2^53 + 3."""
    with pytest.raises(ApiError, match=r"`schema`: `maximum` beyond 2\^53"):
        schema_format(schema_of(2**53 + 3), "schema", strict=True)
    loose = schema_format(schema_of(2**53 + 3), "schema")
    assert loose.left_out == ["keyword maximum"]
    for bound in (2**53, 2**63 - 1):
        schema = schema_of(bound)
        held = schema_format(schema, "schema", strict=True).schema
        assert held == {**schema, "additionalProperties": False}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"schema": OBJECT}, "schema": OBJECT}, "`schema` exclude each other"),
    ({"json_schema": {"type": "object", "schema": OBJECT}}, "json_schema.type` is not supported"),
    ({"json_schema": {"schema": OBJECT, "rank": 1}}, "json_schema.rank` is not supported"),
    ({"json_schema": [OBJECT]}, "json_schema` must be an object, got an array of 1"),
    ({"schema": 5}, ".schema` must be an object, got 5"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_errors_name_what_the_client_sent(given: dict[str, Any], words: str) -> None:
    """The validator moves fields, and errors have the places of the body."""
    form = {"type": "json_schema", **given}
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"model": "m", "messages": messages, "response_format": form}
    message = {"model": "m", "max_tokens": 1, "messages": messages}
    response = {"model": "m", "input": "Hi", "text": {"format": form}}
    for schema, body in (
        (ChatBody, chat),
        (ResponsesBody, response),
        (MessagesBody, {**message, "output_config": {"format": form}}),
    ):
        with pytest.raises(ApiError) as error:
            parse(json.dumps(body).encode(), schema)
        assert words in str(error.value)
