"""Objects have the properties that a schema lists, unless it says otherwise or combines schemas."""

import json
from copy import deepcopy
from typing import Any

import pytest

from lowbit.runtime.text.closed_schema import closed

A = {"a": {"type": "integer"}}
B = {"b": {"type": "integer"}}
SHUT = {"additionalProperties": False}
LISTED = {"type": "object", "properties": A, "required": ["a"]}
CLOSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LISTED, {**LISTED, **SHUT}),
    ({"properties": {"not": {}, "if": LISTED}}, {"properties": {"not": {}, "if": LISTED | SHUT}}),
    ({"items": LISTED}, {"items": LISTED | SHUT}),
    ({"prefixItems": [LISTED]}, {"prefixItems": [LISTED | SHUT]}),
    ({"additionalProperties": LISTED}, {"additionalProperties": LISTED | SHUT}),
    ({"patternProperties": {"x": LISTED}}, {"patternProperties": {"x": LISTED | SHUT}}),
    (
        {"$ref": "#/$defs/x", "title": "T", "$defs": {"x": {"anyOf": [LISTED, {"type": "null"}]}}},
        {
            "$ref": "#/$defs/x",
            "title": "T",
            "$defs": {"x": {"anyOf": [LISTED | SHUT, {"type": "null"}]}},
        },
    ),
    ({"oneOf": [LISTED, {"properties": B}]}, {"oneOf": [LISTED | SHUT, {"properties": B, **SHUT}]}),
]
CLOSED[1][1].update(SHUT)
OPEN: list[dict[str, Any]] = [
    {**LISTED, "additionalProperties": True},
    {**LISTED, "additionalProperties": {"type": "string"}},
    {**LISTED, "patternProperties": {"^x": {}}},
    {**LISTED, "required": ["a", "b"]},  # a closed one could never have `b`
    {**LISTED, "anyOf": [{"required": ["b"]}, {"properties": B}]},
    {"allOf": [LISTED, {"properties": B}]},
    {"$ref": "#/$defs/x", "properties": B, "$defs": {"x": LISTED}},
    {"properties": {"inner": {"allOf": [{"$ref": "#/$defs/x"}]}}, "$defs": {"x": LISTED}},
    {**LISTED, "if": {"properties": A}, "then": {"required": ["b"]}},
    {**LISTED, "dependentSchemas": {"a": {"required": ["b"]}}},
    {"not": LISTED},
    {"type": "object", "properties": {}},
    {"type": "object"},
    {"enum": [LISTED]},
    {"properties": 5, "required": "a", "items": True, "anyOf": "x"},
]


@pytest.mark.parametrize(("schema", "found"), CLOSED, ids=json.dumps)
def test_listed_properties_are_all(schema: dict[str, Any], found: dict[str, Any]) -> None:
    before = deepcopy(schema)
    assert closed(schema) == found
    assert schema == before


@pytest.mark.parametrize("schema", OPEN, ids=json.dumps)
def test_what_may_have_other_properties_is_as_it_was(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_a_schema_deeper_than_a_grammar_takes_is_refused_elsewhere() -> None:
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"items": deep}
    assert closed(deep)["items"]
