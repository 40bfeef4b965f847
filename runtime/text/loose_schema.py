"""JSON schemas without the keywords that no grammar here can hold, for answers that are not strict.

What is left allows more than the schema does; the names of the keywords tell a client so.
"""

import re
from collections.abc import Mapping
from typing import Any

from lowbit.runtime.text.grammar_source import MOST_LEVELS

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
# Look-ahead, look-behind and references to groups.
UNHELD_PATTERN = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\[1-9k]")
OF_NAMES = ("properties", "$defs", "definitions")  # their keys are names, not keywords
OF_SCHEMAS = ("items", "additionalProperties", "additionalItems")
OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")


def loosened(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A schema without keywords that cannot be held, and the names of those keywords."""
    names: dict[str, None] = {}
    found: dict[str, Any] = _loosened(schema, names, MOST_LEVELS)
    return found, list(names)


def _loosened(schema: Any, names: dict[str, None], levels: int) -> Any:
    if not isinstance(schema, Mapping) or not levels:
        return schema  # deeper ones are refused later
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if _is_unheld(keyword, value, schema):
            if value not in (False, None):  # `uniqueItems: false` asks for nothing
                names[keyword] = None
        elif keyword in OF_NAMES and isinstance(value, Mapping):
            found[keyword] = {
                name: _loosened(each, names, levels - 2) for name, each in value.items()
            }
        elif keyword == "patternProperties" and isinstance(value, Mapping):
            held = [name for name in value if not UNHELD_PATTERN.search(name)]
            if len(held) < len(value):
                names[keyword] = None
            found[keyword] = {name: _loosened(value[name], names, levels - 2) for name in held}
        elif keyword in OF_LISTS and isinstance(value, list):
            found[keyword] = [_loosened(each, names, levels - 2) for each in value]
        elif keyword in OF_SCHEMAS:
            found[keyword] = _loosened(value, names, levels - 1)
        else:
            found[keyword] = value
    return found


def _is_unheld(keyword: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if keyword == "pattern":
        return isinstance(value, str) and UNHELD_PATTERN.search(value) is not None
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    if keyword in ("minProperties", "maxProperties"):
        properties, required = schema.get("properties"), schema.get("required")
        optional = set(properties) if isinstance(properties, Mapping) else set()
        return bool(optional.difference(required if isinstance(required, list) else ()))
    return keyword in UNHELD
