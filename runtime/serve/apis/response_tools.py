"""Tools of a request for /v1/responses: what the model is offered, and what its calls are called.

A custom tool, whose input is one text, is offered as a function with one string. The functions of a
namespace are offered under both names. Tools that OpenAI's servers run are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag

from lowbit.runtime.serve.apis.custom_tools import CustomFormat, custom_function
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.conversation import ToolChoice
from lowbit.runtime.serve.request.fields import TolerantBody
from lowbit.runtime.serve.request.parts import SkippedPart, by_type
from lowbit.runtime.serve.settings import MOST_TOOLS


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
    """A tool as the model is offered it.

    Attributes:
        function: it as OpenAI's chats have it.
        name: name in the request.
        namespace: its namespace in the request.
        custom: its calls have one text.
    """

    function: Mapping[str, Any]
    name: str
    namespace: str | None = None
    custom: bool = False


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
) -> tuple[ToolChoice, list[OfferedTool], list[str]]:
    """The choice, the tools that are left by it, and what is left out of it.

    Raises:
        ApiError: a function without a name.
    """
    tools = list(offered.values())
    if given in ("auto", "none", "required"):
        return ToolChoice(given), tools, []  # type: ignore[arg-type]
    if not isinstance(given, ChosenTool):
        return ToolChoice(), tools, []
    if given.type in ("function", "custom"):
        if given.name is None:
            where = "tool_choice.name"
            raise invalid(f"`{where}` is missing", where, "missing_required_parameter")
        return ToolChoice("named", offered_name(given.name, given.namespace)), tools, []
    if given.type == "allowed_tools":
        names = {
            offered_name(each["name"], each.get("namespace"))
            for each in given.tools or ()
            if isinstance(each, dict) and isinstance(each.get("name"), str)
        }
        left = [tool for name, tool in offered.items() if name in names]
        return ToolChoice(given.mode or "auto"), left, []
    return ToolChoice(), tools, [f"tool_choice {given.type}"]


def _flat(tools: Sequence[Any] | None) -> Iterator[tuple[Any, str | None]]:
    """Tools, and those of namespaces with the name of theirs."""
    for tool in tools or ():
        if isinstance(tool, NamespaceTool):
            yield from ((each, tool.name) for each in tool.tools)
        else:
            yield tool, None
