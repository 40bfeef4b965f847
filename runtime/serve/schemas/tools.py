"""Tools that a model may call, in chats."""

from typing import Annotated, Any, Literal

from pydantic import Field

from lowbit.runtime.serve.limits import MOST_TOOLS
from lowbit.runtime.serve.schemas.common import Body


class Function(Body):
    """`tools[].function`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Body):
    """One of `tools`."""

    HARMLESS = frozenset({"cache_control"})
    type: Literal["function"]
    function: Function
    cache_control: Any = None


ChatTools = Annotated[list[ChatTool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class FunctionName(Body):
    """The function of a named choice."""

    name: str


class NamedChoice(Body):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    """`tool_calls[].function` of an earlier turn."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call of an earlier turn."""

    HARMLESS = frozenset({"index", "id", "provider_specific_fields", "cache_control"})
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    provider_specific_fields: Any = None
    cache_control: Any = None
