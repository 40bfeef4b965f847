"""JSON schemas without the keywords that no grammar here can hold, for answers that are not strict.

What is left allows more than the schema does; the names of the keywords tell a client so.
"""

import json
import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from lowbit.runtime.text.grammar_source import MOST_LEVELS
from lowbit.runtime.text.tools import ANYTHING, ArgumentTypes, choices_of, resolve

# Keywords that llguidance does not implement, whatever the values.
UNHELD = frozenset(
    (
        *("uniqueItems", "propertyNames", "not", "contains", "minContains", "maxContains"),
        *("dependencies", "dependentRequired", "dependentSchemas", "if", "then", "else"),
        *("unevaluatedItems", "unevaluatedProperties"),
    )
)
FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "unknown"),
    )
)
BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
# llguidance reads bounds in FP64 and some integers in 64 bits: beyond this it rounds a bound, takes
# values away that the schema allows, or refuses the schema.
WIDEST_BOUND = 2**53
LARGEST_INTEGER = 2**63 - 1  # of 64 bits, which it keeps as the maximum of integers
# Look-ahead, look-behind and references to groups.
UNHELD_PATTERN = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\[1-9k]")
OF_NAMES = ("properties", "$defs", "definitions")  # their keys are names, not keywords
OF_SCHEMAS = ("items", "additionalProperties", "additionalItems")
OF_LISTS = ("anyOf", "allOf", "prefixItems", "items")
# Most branches, required properties and choices that are compared.
MOST_BRANCHES, MOST_REQUIRED, MOST_CHOICES = 32, 16, 256


def loosened(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A schema without keywords that cannot be held, and the names of those keywords.

    `oneOf` becomes `anyOf`, and is named unless no value can match two of its branches.
    """
    names: dict[str, None] = {}
    found: dict[str, Any] = _loosened(schema, names, MOST_LEVELS, ArgumentTypes(schema))
    return found, list(names)


def rounded_bounds(schema: Mapping[str, Any]) -> list[str]:
    """Names of the bounds that llguidance would round without a word; it refuses other keywords."""
    return [name for name in loosened(schema)[1] if name in BOUNDS]


def _loosened(schema: Any, names: dict[str, None], levels: int, types: ArgumentTypes) -> Any:
    if not isinstance(schema, Mapping) or not levels:
        return schema  # deeper ones are refused later
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if _is_unheld(keyword, value, schema):
            if value not in (False, None):  # `uniqueItems: false` asks for nothing
                names[keyword] = None
        elif keyword in OF_NAMES and isinstance(value, Mapping):
            found[keyword] = {
                name: _loosened(each, names, levels - 2, types) for name, each in value.items()
            }
        elif keyword == "patternProperties" and isinstance(value, Mapping):
            held = [name for name in value if not UNHELD_PATTERN.search(name)]
            if len(held) < len(value):
                names[keyword] = None
            found[keyword] = {
                name: _loosened(value[name], names, levels - 2, types) for name in held
            }
        elif keyword in OF_LISTS and isinstance(value, list):
            found[keyword] = [_loosened(each, names, levels - 2, types) for each in value]
        elif keyword == "oneOf" and isinstance(value, list):
            if "anyOf" not in schema:
                found["anyOf"] = [_loosened(each, names, levels - 2, types) for each in value]
            if "anyOf" in schema or not _exclude_each_other(value, types):
                names[keyword] = None
        elif keyword in OF_SCHEMAS:
            found[keyword] = _loosened(value, names, levels - 1, types)
        else:
            found[keyword] = value
    return found


def _exclude_each_other(branches: list[Any], types: ArgumentTypes) -> bool:
    """True if no value matches two of these schemas, as far as types and choices tell."""
    whole = [_whole(each, types) for each in branches[: MOST_BRANCHES + 1]]
    return len(whole) <= MOST_BRANCHES and all(
        _differ(one, other, types)
        or any(
            _differ(_whole(value, types), _whole(_properties(other).get(name), types), types)
            for name, value in _properties(one).items()
        )
        for one, other in combinations(whole, 2)
    )


def _whole(schema: Any, types: ArgumentTypes) -> Mapping[str, Any]:
    if isinstance(schema, Mapping) and "$ref" in schema:
        schema = resolve(schema["$ref"], types.root)
    return schema if isinstance(schema, Mapping) else ANYTHING


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The first required properties of an object."""
    known, required = schema.get("properties"), schema.get("required")
    names = required[:MOST_REQUIRED] if isinstance(required, list) else []
    properties = known if isinstance(known, Mapping) else {}
    return {
        name: properties[name] for name in names if isinstance(name, str) and name in properties
    }


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], types: ArgumentTypes) -> bool:
    """True if types or choices of two schemas have nothing in common."""
    kinds = [
        found | {"integer"} if "number" in found else found
        for found in (types.of(one), types.of(other))
    ]
    if all(kinds) and kinds[0].isdisjoint(kinds[1]):
        return True
    choices = [choices_of(each) for each in (one, other)]
    texts = [{json.dumps(each) for each in found[:MOST_CHOICES]} for found in choices]
    return all(0 < len(each) <= MOST_CHOICES for each in choices) and texts[0].isdisjoint(texts[1])


def _is_unheld(keyword: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if keyword == "pattern":
        return isinstance(value, str) and UNHELD_PATTERN.search(value) is not None
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    if keyword in ("minProperties", "maxProperties"):
        properties, required = schema.get("properties"), schema.get("required")
        optional = set(properties) if isinstance(properties, Mapping) else set()
        return bool(optional.difference(required if isinstance(required, list) else ()))
    if keyword in BOUNDS:
        if (keyword, value, schema.get("type")) == ("maximum", LARGEST_INTEGER, "integer"):
            return False
        return isinstance(value, int | float) and abs(value) > WIDEST_BOUND
    return keyword in UNHELD
