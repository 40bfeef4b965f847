"""Functions that a model may call: their schemas, their arguments as JSON and as typed text."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, NoReturn

from lowbit.formats.errors import RequestError
from lowbit.formats.text.template import ChatTemplate

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")  # the forms need a name without spaces, < and >
MAX_TOOLS = 512
MAX_SCHEMA_DEPTH = 64

# json: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen3 and Qwen2.5 write it.
# xml: `<tool_call><function=NAME><parameter=KEY>...`, as Qwen3.5 and Qwen3-Coder write it.
CallForm = Literal["json", "xml"]
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
        """Read no part yet.

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


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    schema: Mapping[str, Any] = field(default_factory=dict)
    # Arguments that are made under the schema must follow all of it; else keywords that cannot be
    # enforced are left out
    strict: bool = False
    # The object of the request, which chat templates take
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    types: ArgumentTypes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Prepare to read types when they are asked for."""
        object.__setattr__(self, "types", ArgumentTypes(self.schema))


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Tools of a request, as the OpenAI API lists them.

    Args:
        tools: objects with `type` and `function`, which has `name` and maybe `parameters`.

    Raises:
        RequestError: names the tool and what is wrong with it.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str) or len(tools) > MAX_TOOLS:
        raise RequestError(f"`tools` must be a list of at most {MAX_TOOLS} tools")
    found: dict[str, Tool] = {}
    for number, tool in enumerate(tools, start=1):
        read = _read(tool, f"tool {number}")
        if read.name in found:
            raise RequestError(f"tool {number}: the name `{read.name}` stands twice")
        found[read.name] = read
    return tuple(found.values())


def _read(tool: Any, where: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} is not an object with `type` and `function`")
    kind, function = tool.get("type"), tool.get("function")
    if kind != "function":
        raise RequestError(f"{where}: type {kind!r:.80} is not supported", hint="use `function`")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}: `function` must be an object with `name`")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{where}: the name {name!r:.80} is not one of a function",
            hint="use 1 to 128 letters, digits, _ - . : /",
        )
    if schema is not None and not (isinstance(schema, dict) and is_plain(schema, MAX_SCHEMA_DEPTH)):
        raise RequestError(
            f"{where}: `parameters` of `{name}` must be a JSON schema, an object",
            hint=f"plain JSON, nested at most {MAX_SCHEMA_DEPTH} deep",
        )
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise RequestError(f"{where}: `strict` must be true or false, got {strict!r:.80}")
    if schema is None:  # the function has no parameters
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    return Tool(name, schema, strict is True, tool)


def knows_tools(template: ChatTemplate) -> bool:
    """True if a template shows tools to the model."""
    return "tools" in template.source


def form_of(template: ChatTemplate) -> CallForm | None:
    """The form of calls that a template teaches; None where it teaches none."""
    if not knows_tools(template) or OPEN_CALL not in template.source:
        return None
    return "xml" if "<function=" in template.source else "json"


def typed_value(text: str, schema: Any, types: ArgumentTypes) -> Any:
    """The value that a text stands for; the text itself where it is of none of the other types.

    A string stays one if its schema is that of strings, whatever it looks like. Where the schema
    says nothing about the type, only objects and lists are read as JSON.

    Args:
        text: without the line breaks that the form puts around it.
        types: types of the schema that it is part of.
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


def read_json(text: str) -> Any:
    """Parse JSON; line breaks may stand in strings as they are, as models write them.

    Raises:
        ValueError: not JSON, NaN or an infinity, too deep nesting, or too long a number.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(value: Any) -> str:
    """Valid JSON that UTF-8 can hold.

    Raises:
        ValueError: a number that is not finite, or too deep nesting.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not is_unicode(text):
        return json.dumps(value)  # half a surrogate pair stays an escape
    return text


def is_unicode(text: str) -> bool:
    """True if UTF-8 can hold a text: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_plain(value: Any, depth: int) -> bool:
    """True if a value is made of what JSON has, with at most `depth` objects and lists nested."""
    if isinstance(value, list | dict) and depth == 0:
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list):
        return all(is_plain(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v, depth - 1) for k, v in value.items())
    return value is None or isinstance(value, str | bool | int)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
