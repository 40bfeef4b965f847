"""JSON schemas whose objects have the properties that are named, and no others.

JSON Schema allows others wherever `additionalProperties` does not forbid them, but whoever lists
properties means these: functions fail on an argument that they do not have, and a model that may
go on adding properties does not come to an end. Grammars of other servers close objects, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lowbit.runtime.text.grammar_source import MOST_LEVELS
from lowbit.runtime.text.loose_schema import OF_LISTS, OF_NAMES, OF_SCHEMAS

# Keywords by which an object may have properties that another part of the schema names.
COMBINING = frozenset(
    (
        *("allOf", "not", "if", "then", "else", "dependencies", "dependentSchemas"),
        *("unevaluatedProperties", "$dynamicRef"),
    )
)
ALTERNATIVES = ("anyOf", "oneOf", "$ref")  # combining beside `properties`
OPEN = ("additionalProperties", "patternProperties")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with `additionalProperties: false` where an object only lists its properties.

    One that combines schemas of an object is left as it is: each of them may have properties that
    the others do not list.
    """
    if any(_combines(part) for part in _parts(schema, MOST_LEVELS)):
        return schema
    found: dict[str, Any] = _closed(schema, MOST_LEVELS)
    return found


def _combines(schema: Mapping[str, Any]) -> bool:
    if "properties" in schema and any(name in schema for name in ALTERNATIVES):
        return True
    return not COMBINING.isdisjoint(schema)


def _parts(schema: Any, levels: int) -> Iterator[Mapping[str, Any]]:
    """A schema and those within it; what is nested deeper than a grammar takes is refused later."""
    if not isinstance(schema, Mapping) or not levels:
        return
    yield schema
    for keyword, value in schema.items():
        for each in _within(keyword, value):
            yield from _parts(each, levels - 1)


def _within(keyword: str, value: Any) -> list[Any]:
    if keyword in (*OF_NAMES, "patternProperties") and isinstance(value, Mapping):
        return list(value.values())
    if keyword in (*OF_LISTS, "oneOf") and isinstance(value, list):
        return value
    return [value] if keyword in OF_SCHEMAS else []


def _closed(schema: Any, levels: int) -> Any:
    if not isinstance(schema, Mapping) or not levels:
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        inner = _within(keyword, value)
        if not inner:
            found[keyword] = value
        elif isinstance(value, Mapping) and keyword not in OF_SCHEMAS:
            found[keyword] = {name: _closed(each, levels - 1) for name, each in value.items()}
        elif isinstance(value, list):
            found[keyword] = [_closed(each, levels - 1) for each in value]
        else:
            found[keyword] = _closed(value, levels - 1)
    if _lists_all(schema):
        found["additionalProperties"] = False
    return found


def _lists_all(schema: Mapping[str, Any]) -> bool:
    """True if a schema has properties, those that it requires among them, and allows others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(properties, Mapping)
        and bool(properties)
        and isinstance(required, list)
        and all(name in properties for name in required if isinstance(name, str))
        and not any(name in schema for name in OPEN)
    )
