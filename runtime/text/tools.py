"""Functions that a model may call, and the form in which its chat template teaches calls."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lowbit.formats.errors import RequestError
from lowbit.formats.text.template import ChatTemplate
from lowbit.runtime.text.plain_json import is_plain
from lowbit.runtime.text.typed_values import ArgumentTypes

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")  # the forms need a name without spaces, < and >
MAX_TOOLS = 512
MAX_DEPTH = 64  # of a schema

# json: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen3 and Qwen2.5 write it.
# xml: `<tool_call><function=NAME><parameter=KEY>...`, as Qwen3.5 and Qwen3-Coder write it.
CallForm = Literal["json", "xml"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        name: by which it is called.
        schema: JSON schema of the object of its arguments.
        strict: arguments that are made under the schema must follow all of it; else keywords that
            cannot be enforced are left out.
        given: the object of the request, which chat templates take.
        types: that the parts of the schema allow.
    """

    name: str
    schema: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    types: ArgumentTypes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Read types when they are asked for."""
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
    if schema is not None and not (isinstance(schema, dict) and is_plain(schema, MAX_DEPTH)):
        raise RequestError(
            f"{where}: `parameters` of `{name}` must be a JSON schema, an object",
            hint=f"plain JSON, nested at most {MAX_DEPTH} deep",
        )
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise RequestError(f"{where}: `strict` must be true or false, got {strict!r:.80}")
    return Tool(name, schema or {}, strict is True, tool)


def form_of(template: ChatTemplate) -> CallForm | None:
    """The form of calls that a template teaches; None where it teaches none."""
    if "tools" not in template.source or OPEN_CALL not in template.source:
        return None
    return "xml" if "<function=" in template.source else "json"
