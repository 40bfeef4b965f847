"""`functions` and `function_call` of chats, as OpenAI's API had them before `tools`.

They are offered as tools, and an answer has at most one call, in the form of that time.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from lowbit.runtime.engine.delta import End
from lowbit.runtime.serve.apis.tools import (
    ChatChoice,
    ChatTools,
    Function,
    FunctionName,
    NamedChoice,
    functions_of,
)
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.body import Body
from lowbit.runtime.serve.request.explain import WRONG
from lowbit.runtime.serve.settings import MOST_TOOLS
from lowbit.runtime.text.answer import ToolArguments, ToolCallStart

WHERE = "function_call"


class FunctionFields(Body):
    """`functions` and `function_call` in a body."""

    functions: Annotated[list[Function], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    function_call: Literal["auto", "none"] | FunctionName | None = None


def asked_functions(
    tools: ChatTools | None, choice: str | ChatChoice | None, fields: FunctionFields
) -> tuple[list[dict[str, Any]], str | ChatChoice | None]:
    """Functions of a body by either field, and the choice of one as `tool_choice` has it.

    Raises:
        ApiError: both fields are given, or `function_call` names a function that is not there.
    """
    named = fields.function_call
    if tools and fields.functions:
        raise invalid("`functions` and `tools` exclude each other", "functions")
    if isinstance(named, FunctionName):
        names = [each.name for each in fields.functions or ()]
        if named.name not in names:
            raise invalid(f"`{WHERE}`: `functions` has no `{named.name}`", WHERE, WRONG)
    if not fields.functions:
        word = named if tools and isinstance(named, str) else None
        return functions_of(tools), choice or word
    found = [{"type": "function", "function": each.plain()} for each in fields.functions]
    if isinstance(named, FunctionName):
        return found, NamedChoice(type="function", function=named)
    return found, named or choice


def finish_reason(fields: FunctionFields, end: End) -> str:
    """`finish_reason` of a chat."""
    called = fields.functions and end.chat_reason == "tool_calls"
    return WHERE if called else end.chat_reason


def function_delta(found: ToolCallStart | ToolArguments) -> dict[str, Any] | None:
    """The delta for a part of a call; None for that of another than the first."""
    if found.index:  # the first has broken off
        return None
    if isinstance(found, ToolCallStart):
        return {WHERE: {"name": found.name, "arguments": ""}}
    return {WHERE: {"arguments": found.fragment}}
