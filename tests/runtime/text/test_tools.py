"""Text as a value of the type that its JSON schema names."""

from typing import Any

import pytest

from lowbit.runtime.text.tools import MOST_PARTS, ArgumentTypes, schema_of, typed_value

ROOT = {"$defs": {"Size": {"type": "integer"}, "a/b": {"enum": ["1", "2"]}, "loop": {}}}
ROOT["$defs"]["loop"] = {"$ref": "#/$defs/loop"}
NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '"x"', '"x"'),
        ({"type": "string"}, ' {"a": 1} ', ' {"a": 1} '),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "1" * 5000, "1" * 5000),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, "[1, null]", [1, None]),
        ({"type": "array"}, "[1,", "[1,"),
        ({"type": "array"}, "[" * 10**5, "[" * 10**5),
        ({"type": "object"}, '{"a":\n[1]}', {"a": [1]}),
        ({"type": "object"}, "[1]", "[1]"),
        ({"items": {}}, "[1]", [1]),
        ({"properties": {}}, "{}", {}),
        (NULLABLE, "null", None),
        (NULLABLE, "5", "5"),
        (NULLABLE, "none", "none"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "all", "all"),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"oneOf": [{"type": "integer"}, {"type": "array"}]}, "[5]", [5]),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "5", 5),
        ({"enum": ["5", "six"]}, "5", "5"),
        ({"enum": [5, "six"]}, "5", 5),
        ({"enum": [5, "null", None]}, "null", "null"),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/Size"}, "5", 5),
        ({"$ref": "#/$defs/a~1b"}, "1", "1"),
        ({"$ref": "#/$defs/loop"}, "5", "5"),
        ({"$ref": "#/$defs/missing"}, "5", "5"),
        ({"$ref": "http://x"}, "5", "5"),
        ({}, "5", "5"),
        ({}, "null", "null"),
        ({}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{}, {"type": "integer"}]}, "5", "5"),
        (True, "[5]", [5]),
        (None, "5", "5"),
        ({"type": 5}, "5", "5"),
    ],
)
def test_values_by_schema(schema: Any, text: str, value: Any) -> None:
    found = typed_value(text, schema, ArgumentTypes(ROOT))
    assert found == value
    assert type(found) is type(value)


def test_alternatives_that_nest_without_end_allow_anything() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        schema = {"anyOf": [schema]}
    assert ArgumentTypes({}).of(schema) == frozenset()


class Counted(dict[str, Any]):
    """A schema that counts how often its alternatives are read."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.reads += key == "anyOf"
        return super().get(key, default)


def test_a_schema_that_refers_to_itself_in_breadth_is_read_once() -> None:
    loop = Counted(anyOf=[{"$ref": "#/$defs/loop"} for _ in range(30)])
    types = ArgumentTypes({"$defs": {"loop": loop}})
    for _ in range(3):
        assert types.of(loop) == types.of({"$ref": "#/$defs/loop"}) == frozenset()
    assert 0 < loop.reads <= 3


def test_a_circle_beside_other_types_allows_anything() -> None:
    root = {"$defs": {"t": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/t"}]}}}
    assert typed_value("5", {"$ref": "#/$defs/t"}, ArgumentTypes(root)) == "5"
    assert typed_value("[5]", {"$ref": "#/$defs/t"}, ArgumentTypes(root)) == [5]


def test_parts_beyond_the_limit_allow_anything() -> None:
    parts = [{"allOf": [{"type": "integer"}]} for _ in range(MOST_PARTS)]
    types = ArgumentTypes({})
    found = [types.of(part) for part in parts]
    assert found[0] == {"integer"}
    assert found[-1] == frozenset()
    assert types.of(parts[0]) == {"integer"}


def test_arguments_that_are_not_described_use_up_no_parts() -> None:
    types = ArgumentTypes({})
    for _ in range(MOST_PARTS + 1):
        types.of(schema_of("x", types.root))
    assert types.of({"type": "integer"}) == {"integer"}
