"""Schemas without what cannot be held, against llguidance's own judgement."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

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


def tagged(tag: str) -> dict[str, Any]:
    properties = {"kind": {"const": tag}, "x": {"type": "integer"}}
    return {"type": "object", "properties": properties, "required": ["x", "kind"]}


OVERLAPPING: list[tuple[list[Any], bool]] = [
    ([{"type": "integer"}, {"type": "number"}], True),
    ([{"type": "string", "pattern": "^a"}, {"type": "string", "maxLength": 2}], True),
    ([{"enum": [1, 2]}, {"enum": [2, 3]}], True),
    ([{"enum": [1, 2]}, {"const": 3}], False),
    ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], False),
    ([{"$ref": "#/$defs/a"}, tagged("a")], True),
    ([{"$ref": "#/$defs/a"}, {"type": "object", "required": ["kind"]}], True),
]
HELD: list[dict[str, Any]] = [
    {"type": "object", "properties": {"not": {"type": "string"}, "format": {"type": "null"}}},
    {"type": "string", "format": "date-time"},
    {"type": "string", "pattern": r"^\\1$"},
    {"type": "object", "properties": A_AND_B, "required": ["a", "b"], "minProperties": 1},
    {"enum": [{"not": 1}, "(?=x)"]},
    {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
    {"type": "number", "exclusiveMinimum": -(2**53), "maximum": 0.5},
    {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
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


@pytest.mark.parametrize(("branches", "overlap"), OVERLAPPING)
def test_one_of_becomes_any_of(branches: list[Any], overlap: bool) -> None:
    """It is named where a value may match two branches."""
    schema = {"oneOf": branches, "$defs": {name: tagged(name) for name in "ab"}}
    assert refusal(schema)
    found, left_out = loosened(schema)
    assert (found["anyOf"], left_out) == (branches, ["oneOf"] if overlap else [])
    assert not refusal(found)


def test_branches_that_are_no_schemas_are_left_to_the_compiler() -> None:
    broken = [1, {"required": [["kind"]], "properties": 2}, {"required": "x"}, {"$ref": ["#"]}]
    assert loosened({"oneOf": broken}) == ({"anyOf": broken}, ["oneOf"])


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize(
    ("bounds", "value"),
    [
        ({"minimum": -(2**63), "exclusiveMaximum": 2**63}, 2**63 - 1),
        ({"maximum": 2**64 - 1}, 2**64 - 1),
        ({"exclusiveMinimum": -(2**53) - 1}, -(2**53)),
        ({"minimum": -1e300, "exclusiveMaximum": 1.7e308}, 12),
        ({"maximum": float("inf")}, 12),
    ],
)
def test_bounds_that_would_take_values_away_are_left_out(
    kind: str, bounds: dict[str, Any], value: int
) -> None:
    found, left_out = loosened({"type": kind, **bounds})
    assert (found, left_out) == ({"type": kind}, list(bounds))
    tokens = LLTokenizer("byte")
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_json_schema(json.dumps(found)))
    assert matcher.consume_tokens(tokens.tokenize_str(str(value)))


def test_the_largest_integer_of_64_bits_is_a_bound_that_holds() -> None:
    bounded = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
    tokens = LLTokenizer("byte")
    for value in (2**63 - 2, 2**63 - 1, 2**63, 2**63 + 1):
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_json_schema(json.dumps(bounded)))
        written = matcher.try_consume_tokens(tokens.tokenize_str(str(value)))
        assert (written == len(str(value))) == (value < 2**63)
    assert loosened({**bounded, "type": "number"})[1] == ["maximum"]  # which has no such end


@pytest.mark.parametrize("schema", HELD)
def test_what_can_be_held_stays(schema: dict[str, Any]) -> None:
    assert not refusal(schema)
    assert loosened(schema) == (schema, [])


def test_deep_schemas_end() -> None:
    schema: dict[str, Any] = {"not": {}}
    for _ in range(500):
        schema = {"items": schema}
    assert loosened(schema)[1] == []
