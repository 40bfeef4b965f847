"""Values of arguments that are written as plain text, typed by their JSON schema."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from lowbit.runtime.text.plain_json import read_json

ANY: Final[frozenset[str]] = frozenset()  # types of a schema that allows every value
ANYTHING: Final[Mapping[str, Any]] = MappingProxyType({})  # schema of what is not described
MAX_DEPTH = 16  # of references and alternatives that are followed
MOST_PARTS = 10_000  # of a schema that are read; others allow every value
NULLS = ("null", "None")  # Qwen3.5's template writes Python's None, True and False
FLAGS = {"true": True, "True": True, "false": False, "False": False}
_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


class ArgumentTypes:
    """Types that the parts of one schema allow; each part is read once, MOST_PARTS in all.

    References may lead in circles, and in breadth: thirty of them that lead back to their own list
    would be thirty to the power of their depth visits.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        """Nothing is read yet.

        Args:
            root: schema to whose parts `$ref` points.
        """
        self.root = root
        self._found: dict[int, tuple[Any, frozenset[str]]] = {}  # by identity, kept alive

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Names of the types that a schema allows; ANY if it does not say, or is in a circle."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return ANY
        known = self._found.get(id(schema))
        if known is not None:
            return known[1]
        if len(self._found) >= MOST_PARTS:
            return ANY
        self._found[id(schema)] = schema, ANY  # what a circle finds
        types = self._own(schema, depth)
        if types and schema.get("nullable") is True:
            types |= {"null"}
        self._found[id(schema)] = schema, types
        return types

    def _own(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        """The types without those that `nullable` adds."""
        named = schema.get("type")
        if isinstance(named, str):
            return frozenset((named,))
        if isinstance(named, list):
            return frozenset(name for name in named if isinstance(name, str))
        if "$ref" in schema:
            return self.of(resolve(schema["$ref"], self.root), depth + 1)
        if choices := choices_of(schema):
            return frozenset(_TYPES.get(type(choice), "string") for choice in choices)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                found = {self.of(part, depth + 1) for part in schema[key]}
                return ANY if ANY in found else frozenset().union(*found)
        if isinstance(schema.get("allOf"), list):
            told = {types for part in schema["allOf"] if (types := self.of(part, depth + 1))}
            return frozenset.intersection(*told) if told else ANY
        if "properties" in schema:
            return frozenset(("object",))
        return frozenset(("array",)) if "items" in schema else ANY


def typed_value(text: str, schema: Any, types: ArgumentTypes) -> Any:
    """The value that a text stands for; the text itself where it is of none of the other types.

    A string stays one if its schema is that of strings, whatever it looks like. Where the schema
    says nothing about the type, only objects and lists are read as JSON.

    Args:
        text: without the line breaks that the form puts around it.
        schema: of the value.
        types: of the schema that it is part of.
    """
    allowed = types.of(schema)
    if allowed == {"string"} or (isinstance(schema, Mapping) and text in choices_of(schema)):
        return text
    word = text.strip()
    if "null" in allowed and word in NULLS:
        return None
    if "boolean" in allowed and word in FLAGS:
        return FLAGS[word]
    try:
        value = read_json(word)
    except ValueError:
        return text
    allowed = allowed or frozenset(("object", "array"))
    if "number" in allowed:
        allowed |= {"integer"}
    elif "integer" in allowed and isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if _TYPES[type(value)] in allowed - {"string"} else text


def resolve(reference: Any, root: Mapping[str, Any]) -> Any:
    """The part of a schema that `$ref` names; None if there is none, or not in this schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part: Any = root
    for name in reference[1:].split("/")[1:]:
        if not isinstance(part, Mapping):
            return None
        part = part.get(name.replace("~1", "/").replace("~0", "~"))
    return part


def schema_of(name: str, root: Mapping[str, Any]) -> Any:
    """The schema of one argument; an empty one for an argument that is not described."""
    properties = root.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return root.get("additionalProperties", ANYTHING)


def choices_of(schema: Mapping[str, Any]) -> list[Any]:
    """Values to which `enum` or `const` restricts a schema."""
    if "const" in schema:
        return [schema["const"]]
    choices = schema.get("enum")
    return choices if isinstance(choices, list) else []
