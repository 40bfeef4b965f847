"""Tools as OpenAI's APIs describe them, and as functions that a chat template is told of.

A custom tool, whose input is one text, is offered as a function with one string. The functions of a
namespace are offered under both names. Tools that OpenAI's servers run are left out.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag, TypeAdapter

from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.body import TolerantBody
from lowbit.runtime.serve.request.forms import ChoiceMode
from lowbit.runtime.serve.request.parts import SkippedPart, by_type
from lowbit.runtime.serve.settings import MOST_TOOLS

CUSTOM_INPUT = "input"  # name of the string


class CustomFormat(TolerantBody):
    """Form of a custom tool's input; a grammar is told to the model, and not enforced."""

    type: Literal["text", "grammar"] = "text"
    syntax: str | None = None
    definition: str | None = None


def custom_function(
    name: str, description: str | None, format: CustomFormat | None
) -> dict[str, Any]:
    """A custom tool as a function of OpenAI's chats."""
    text = description or ""
    if format is not None and format.definition:
        kind = f"{format.syntax or ''} grammar".strip()
        text += f"\n\nThe input follows this {kind}:\n{format.definition}"
    return {
        "name": name,
        **({"description": text.strip()} if text.strip() else {}),
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        },
    }


def custom_arguments(text: str) -> str:
    """The arguments of a call of a custom tool."""
    return json.dumps({CUSTOM_INPUT: text})


def custom_input(arguments: str) -> str:
    """The text of a custom tool's call, or its beginning where the call was cut."""
    try:
        found = TypeAdapter(Any).validate_json(
            arguments or "{}", experimental_allow_partial="trailing-strings"
        )
    except ValueError:
        return arguments
    text = found.get(CUSTOM_INPUT, "") if isinstance(found, dict) else arguments
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


class Function(TolerantBody):
    """`tools[].function`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(TolerantBody):
    """One of `tools`."""

    type: Literal["function"]
    function: Function


class CustomGrammar(TolerantBody):
    """`tools[].custom.format`."""

    grammar: CustomFormat | None = None


class CustomDefinition(TolerantBody):
    """`tools[].custom`."""

    name: str
    description: str | None = None
    format: CustomGrammar | None = None


class ChatCustomTool(TolerantBody):
    """One of `tools` whose input is one text."""

    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def grammar(self) -> CustomFormat | None:
        """Grammar of the input."""
        return None if self.custom.format is None else self.custom.format.grammar


AnyChatTool = Annotated[
    Annotated[ChatTool, Tag("function")]
    | Annotated[ChatCustomTool, Tag("custom")]
    | Annotated[SkippedPart, Tag("skipped")],
    by_type("function", "custom", default="function"),
]
ChatTools = Annotated[list[AnyChatTool], Field(fail_fast=True, max_length=MOST_TOOLS)]


def functions_of(
    tools: Sequence[ChatTool | ChatCustomTool | SkippedPart] | None,
) -> list[dict[str, Any]]:
    """The tools as functions; those that cannot be run are left out."""
    found = []
    for tool in tools or ():
        if isinstance(tool, ChatTool):
            found.append(tool.plain())
        elif isinstance(tool, ChatCustomTool):
            custom = custom_function(tool.custom.name, tool.custom.description, tool.grammar)
            found.append({"type": "function", "function": custom})
    return found


class FunctionName(TolerantBody):
    """The function of a named choice."""

    name: str


class NamedChoice(TolerantBody):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


class CustomChoice(TolerantBody):
    """`tool_choice` that names a custom tool."""

    type: Literal["custom"]
    custom: FunctionName


class AllowedTools(TolerantBody):
    """`tool_choice.allowed_tools`."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[Any], Field(fail_fast=True, max_length=MOST_TOOLS)]


class AllowedChoice(TolerantBody):
    """`tool_choice` that names the tools that may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ChatChoice = Annotated[NamedChoice | CustomChoice | AllowedChoice, Field(discriminator="type")]


def chat_choice_of(
    given: str | NamedChoice | CustomChoice | AllowedChoice | None,
    functions: list[dict[str, Any]],
) -> tuple[ChoiceMode, str | None, list[dict[str, Any]], list[str]]:
    """The choice, the function that it names, those that it leaves, and what is left out of it."""
    if isinstance(given, NamedChoice):
        return "named", given.function.name, functions, []
    if isinstance(given, CustomChoice):
        return "named", given.custom.name, functions, []
    if isinstance(given, AllowedChoice):
        names = [_name_of(tool) for tool in given.allowed_tools.tools]
        left = [each for each in functions if each["function"]["name"] in names]
        known = {each["function"]["name"] for each in left}
        return given.allowed_tools.mode, None, left, _missing(names, known)
    return given or "auto", None, functions, []  # type: ignore[return-value]


def _missing(names: Iterable[object], known: Set[str]) -> list[str]:
    """Names of allowed tools that no tool has."""
    left = [name for name in names if isinstance(name, str) and name not in known]
    return [f"allowed tool {name}" for name in left]


def _name_of(tool: Any) -> object:
    """Name of an allowed tool; None where it has none."""
    found = tool
    if isinstance(tool, dict):
        found = tool.get("function") or tool.get("custom") or tool
    return found.get("name") if isinstance(found, dict) else None


class FunctionTool(TolerantBody):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(TolerantBody):
    """A tool whose input is one text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None


OneTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[SkippedPart, Tag("skipped")],
    by_type("function", "custom", default="function"),
]


class NamespaceTool(TolerantBody):
    """Functions under a common name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[OneTool], Field(fail_fast=True, max_length=MOST_TOOLS)]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[SkippedPart, Tag("skipped")],
    by_type("function", "custom", "namespace", default="function"),
]
Tools = Annotated[list[AnyTool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class ChosenTool(BaseModel):
    """`tool_choice` that names a tool, or tools that are allowed."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[Any], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the model is offered it."""

    function: Mapping[str, Any]  # it as OpenAI's chats have it
    name: str  # name in the request
    namespace: str | None = None
    custom: bool = False  # its calls have one text


def offered_name(name: str, namespace: str | None) -> str:
    """Name under which a tool is offered."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def offered_tools(tools: Sequence[Any] | None) -> dict[str, OfferedTool]:
    """Tools that can be offered, by the name under which they are.

    Raises:
        ApiError: two have the same name.
    """
    found: dict[str, OfferedTool] = {}
    for tool, namespace in _flat(tools):
        if isinstance(tool, SkippedPart):
            continue
        name = offered_name(tool.name, namespace)
        if name in found:
            raise invalid(f"`tools`: the name `{name}` stands twice", "tools")
        custom = isinstance(tool, CustomTool)
        form = tool.format if custom else None
        fields = (
            custom_function(tool.name, tool.description, form)
            if custom
            else tool.model_dump(include=FUNCTION)
        )
        given = {key: value for key, value in fields.items() if value is not None}
        found[name] = OfferedTool({**given, "name": name}, tool.name, namespace, custom)
    return found


FUNCTION = {"description", "parameters", "strict"}


def skipped_tools(tools: Sequence[Any] | None) -> list[str]:
    """Names of the tools that are left out, and of grammars that are not enforced."""
    found = []
    for tool, _ in _flat(tools):
        if isinstance(tool, SkippedPart):
            found.append(f"tool {tool.type}")
        elif isinstance(tool, CustomTool) and tool.format is not None and tool.format.definition:
            found.append(f"grammar of {tool.name}")
    return found


def choice_of(
    given: str | ChosenTool | None, offered: Mapping[str, OfferedTool]
) -> tuple[ChoiceMode, str | None, list[OfferedTool], list[str]]:
    """The choice, the tool that it names, the tools that it leaves, and what is left out of it.

    Raises:
        ApiError: a function without a name.
    """
    tools = list(offered.values())
    if given in ("auto", "none", "required"):
        return given, None, tools, []  # type: ignore[return-value]
    if not isinstance(given, ChosenTool):
        return "auto", None, tools, []
    if given.type in ("function", "custom"):
        if given.name is None:
            where = "tool_choice.name"
            raise invalid(f"`{where}` is missing", where, "missing_required_parameter")
        return "named", offered_name(given.name, given.namespace), tools, []
    if given.type == "allowed_tools":
        names = {
            offered_name(each["name"], each.get("namespace"))
            for each in given.tools or ()
            if isinstance(each, dict) and isinstance(each.get("name"), str)
        }
        left = [tool for name, tool in offered.items() if name in names]
        return given.mode or "auto", None, left, _missing(sorted(names), offered.keys())
    return "auto", None, tools, [f"tool_choice {given.type}"]


def _flat(tools: Sequence[Any] | None) -> Iterator[tuple[Any, str | None]]:
    """Tools, and those of namespaces with the name of theirs."""
    for tool in tools or ():
        if isinstance(tool, NamespaceTool):
            yield from ((each, tool.name) for each in tool.tools)
        else:
            yield tool, None
