"""Messages of OpenAI's chats, and the turns that chat templates take."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Tag

from lowbit.runtime.serve.apis.tools import custom_arguments
from lowbit.runtime.serve.request.body import TolerantBody
from lowbit.runtime.serve.request.contents import Content
from lowbit.runtime.serve.request.parts import Text, by_type, refusals_as_text, text_of
from lowbit.runtime.serve.settings import MOST_CALLS, MOST_MESSAGES


def _as_text(value: object) -> object:
    """Arguments of a call as JSON's text, which some clients send as the object itself."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class CalledFunction(TolerantBody):
    """`tool_calls[].function` of an earlier turn."""

    name: str
    arguments: Annotated[str, BeforeValidator(_as_text)]


class ToolCall(TolerantBody):
    """A call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustom(TolerantBody):
    """`tool_calls[].custom` of an earlier turn."""

    name: str
    input: str


class CustomCall(TolerantBody):
    """A call of a custom tool of an earlier turn."""

    id: str | None = None
    type: Literal["custom"]
    custom: CalledCustom


AnyCall = Annotated[
    Annotated[ToolCall, Tag("function")] | Annotated[CustomCall, Tag("custom")],
    by_type("function", "custom", default="function"),
]


class SystemMessage(TolerantBody):
    """Instructions."""

    role: Literal["system", "developer"]
    content: Text
    name: str | None = None


class UserMessage(TolerantBody):
    """A turn of the user."""

    role: Literal["user"]
    content: Text
    name: str | None = None


Calls = Annotated[list[AnyCall], Field(fail_fast=True, max_length=MOST_CALLS)]


class ThinkingBlock(BaseModel):
    """Reasoning as Anthropic's API has it, which LiteLLM sends in chats."""

    model_config = ConfigDict(extra="ignore", strict=True)
    thinking: str = ""


ThinkingBlocks = Annotated[list[ThinkingBlock], Field(fail_fast=True, max_length=MOST_CALLS)]


class AssistantMessage(TolerantBody):
    """A turn of the model, as responses hold it."""

    role: Literal["assistant"]
    content: Annotated[Text, BeforeValidator(refusals_as_text)] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    thinking_blocks: ThinkingBlocks | None = None
    refusal: str | None = None
    audio: None = None
    function_call: CalledFunction | None = None
    tool_calls: Calls | None = None


class ToolMessage(TolerantBody):
    """The result of a tool."""

    role: Literal["tool"]
    content: Text | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionMessage(TolerantBody):
    """The result of a function, from before there were tools."""

    role: Literal["function"]
    content: Text | None = None
    name: str | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]
RESULTS = ("tool", "function")  # roles of what was called

Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]


def contents_of(messages: Sequence[Message]) -> list[Content]:
    """Contents of messages."""
    return [
        Content(
            each.content,
            f"messages[{number}].content",
            shows=each.role in ("user", *RESULTS),
            tool=each.role in RESULTS,
        )
        for number, each in enumerate(messages)
    ]


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them."""
    return [_turn_of(each) for each in messages]


def _turn_of(message: Message) -> dict[str, Any]:
    turn = message.plain()
    if message.role == "function":  # its call has the same id
        turn |= {"role": "tool", "tool_call_id": message.name or ""}
    if (function := turn.pop("function_call", None)) and "tool_calls" not in turn:
        turn["tool_calls"] = [{"id": function["name"], "type": "function", "function": function}]
    if isinstance(message.content, list):
        turn["content"] = text_of(message.content)
    refusal = turn.pop("refusal", "")
    if not (turn.get("content") or turn.get("tool_calls")):
        turn["content"] = refusal
    if turn.pop("thinking_blocks", None) and isinstance(message, AssistantMessage):
        thought = "".join(block.thinking for block in message.thinking_blocks or ())
        if thought and not (message.reasoning_content or message.reasoning):
            turn["reasoning_content"] = thought
    for call in turn.get("tool_calls", ()):
        if custom := call.pop("custom", None):
            function = {"name": custom["name"], "arguments": custom_arguments(custom["input"])}
            call |= {"type": "function", "function": function}
    return turn
