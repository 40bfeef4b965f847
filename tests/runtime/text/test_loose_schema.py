"""Schemas without what cannot be held, against llguidance's own judgement."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from lowbit.runtime.text.loose_schema import loosened

A_AND_B = {"a": {"type": "integer"}, "b": {"type": "integer"}}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
UNHELD: list[tuple[dict[str, Any], list[str]]] = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ["uniqueItems"]),
    ({"type": "array", "uniqueItems": False}, []),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, ["propertyNames"]),
    ({"type": "object", "properties": A_AND_B, "minProperties": 1}, ["minProperties"]),
    ({"type": "string", "pattern": DECIMAL}, ["pattern"]),
    ({"type": "string", "pattern": r"^(a)\1$"}, ["pattern"]),
    ({"type": "object", "patternProperties": {"^(?!a)": {}, "b": {}}}, ["patternProperties"]),
    ({"type": "string", "not": {"const": "a"}}, ["not"]),
    ({"type": "string", "format": "phone"}, ["format"]),
    ({"type": "array", "contains": {"type": "integer"}}, ["contains"]),
    ({"anyOf": [{"type": "string", "format": "byte"}, {"type": "null"}]}, ["format"]),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "string", "format": "iri"}}}, ["format"]),
]
HELD: list[dict[str, Any]] = [
    {"type": "object", "properties": {"not": {"type": "string"}, "format": {"type": "null"}}},
    {"type": "string", "format": "date-time"},
    {"type": "string", "pattern": r"^\\1$"},
    {"type": "object", "properties": A_AND_B, "required": ["a", "b"], "minProperties": 1},
    {"enum": [{"not": 1}, "(?=x)"]},
]


def refusal(schema: dict[str, Any]) -> str:
    return str(
        LLMatcher.validate_grammar(
            LLMatcher.grammar_from_json_schema(json.dumps(schema), None, {"lenient": False})
        )
    )


@pytest.mark.parametrize(("schema", "names"), UNHELD)
def test_what_cannot_be_held_is_left_out_and_named(
    schema: dict[str, Any], names: list[str]
) -> None:
    assert refusal(schema)
    found, left_out = loosened(schema)
    assert left_out == names
    assert not refusal(found)
    assert loosened(found) == (found, [])


@pytest.mark.parametrize("schema", HELD)
def test_what_can_be_held_stays(schema: dict[str, Any]) -> None:
    assert not refusal(schema)
    assert loosened(schema) == (schema, [])


def test_deep_schemas_end() -> None:
    schema: dict[str, Any] = {"not": {}}
    for _ in range(500):
        schema = {"items": schema}
    assert loosened(schema)[1] == []
