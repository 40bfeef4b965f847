"""Items of a request for /v1/responses, and the turns of a conversation that they make."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from lowbit.runtime.serve.apis.tools import custom_arguments, offered_name
from lowbit.runtime.serve.request.body import TolerantBody
from lowbit.runtime.serve.request.contents import Content as Shown
from lowbit.runtime.serve.request.parts import (
    MEDIA,
    MediaPart,
    SkippedPart,
    Turned,
    joined_parts,
    named_types,
)
from lowbit.runtime.serve.settings import MOST_MESSAGES, MOST_PARTS

PARTS = ("input_text", "output_text", "text", "refusal")


class Part(TolerantBody):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class Refusal(TolerantBody):
    """A refusal in place of an answer."""

    type: Literal["refusal"]
    refusal: str


AnyPart = Annotated[Part | Refusal | MediaPart, Field(discriminator="type")]
PartList = Annotated[list[AnyPart], Field(fail_fast=True, max_length=MOST_PARTS)]
Content = str | Annotated[PartList, named_types(*PARTS, *MEDIA)]


def _part_tag(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    if kind in ("input_text", "output_text", "text"):
        return "text"
    return "refusal" if kind == "refusal" else "media" if kind in MEDIA else "other"


OutputPart = Annotated[
    Annotated[Part, Tag("text")]
    | Annotated[Refusal, Tag("refusal")]
    | Annotated[MediaPart, Tag("media")]
    | Annotated[dict[str, Any], Tag("other")],
    Discriminator(_part_tag),
]
OutputParts = Annotated[list[OutputPart], Field(fail_fast=True, max_length=MOST_PARTS)]


class MessageItem(TolerantBody):
    """A turn; `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(TolerantBody):
    """A call of an earlier turn."""

    call_id: str
    name: str
    namespace: str | None = None


class FunctionCallItem(CallItem):
    """A call of a function."""

    type: Literal["function_call"]
    arguments: str


class CustomCallItem(CallItem):
    """A call of a custom tool, whose input is one text."""

    type: Literal["custom_tool_call"]
    input: str


class ShellCallItem(TolerantBody):
    """A command that an earlier turn ran by the tool `local_shell`, which is not offered here."""

    type: Literal["local_shell_call"]
    call_id: str | None = None
    action: dict[str, Any]


class CallOutputItem(TolerantBody):
    """The result of a tool: a text, parts of a message, or anything else as JSON."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: str | None = None
    output: str | OutputParts | dict[str, Any]
    id: str | None = None


class ReasoningText(TolerantBody):
    """Text of a reasoning item."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MOST_PARTS)]


class ReasoningItem(TolerantBody):
    """Reasoning of an earlier turn."""

    type: Literal["reasoning"]
    summary: ReasoningTexts | None = None
    content: ReasoningTexts | None = None


Item = MessageItem | CallItem | ShellCallItem | CallOutputItem | ReasoningItem | SkippedPart
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
CALLS = ("function_call", "custom_tool_call", "local_shell_call")
STORED = "item_reference"  # names an item that a server would have kept


def _tag(item: object) -> str:
    """Schema of an item, by its type, which messages may leave out."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    if kind in OUTPUTS:
        return "output"
    if not isinstance(kind, str):
        return "message"
    return kind if kind in (*CALLS, "message", "reasoning") else "skipped"


def _refuse_stored(items: object) -> object:
    for item in items[:MOST_MESSAGES] if isinstance(items, list) else []:
        if isinstance(item, dict) and item.get("type") == STORED:
            raise ValueError(f"type `{STORED}` is not supported, as nothing is stored")
    return items


TaggedItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[ShellCallItem, Tag("local_shell_call")]
    | Annotated[CallOutputItem, Tag("output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[SkippedPart, Tag("skipped")],
    Discriminator(_tag),
]
ItemList = Annotated[list[TaggedItem], Field(fail_fast=True, max_length=MOST_MESSAGES)]
Items = Annotated[ItemList, BeforeValidator(_refuse_stored)]


def turns_of(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """Turns as OpenAI's chats have them; reasoning, text and calls in a row are one turn."""
    turn: dict[str, Any] = {}
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            yield from _whole(turn)
            turn = {}
            role = "system" if item.role == "developer" else item.role
            yield {"role": role, "content": _text_of(item.content)}
        elif isinstance(item, CallOutputItem):
            yield from _whole(turn)
            turn = {}
            id = item.call_id or item.id or ""
            yield {"role": "tool", "tool_call_id": id, "content": _output_of(item.output)}
        elif isinstance(item, ReasoningItem):
            yield from _whole(turn)
            text = "".join(part.text for part in item.content or item.summary or ())
            turn = {"reasoning_content": text} if text else {}
        elif isinstance(item, CallItem | ShellCallItem):
            turn.setdefault("tool_calls", []).append(_call_of(item))
        elif isinstance(item, MessageItem):
            if "content" in turn or "tool_calls" in turn:
                yield from _whole(turn)
                turn = {}
            turn["content"] = _text_of(item.content)
    yield from _whole(turn)


def left_out_items(items: Sequence[Item]) -> list[str]:
    """Names of items that the prompt lacks."""
    return [f"item {item.type}" for item in items if isinstance(item, SkippedPart)]


def shown_by(items: Sequence[Item]) -> list[Shown]:
    """Contents of items that may hold images."""
    found = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if isinstance(item, MessageItem):
            found.append(Shown(item.content, f"{where}.content", shows=item.role == "user"))
        elif isinstance(item, CallOutputItem):
            found.append(Shown(item.output, f"{where}.output", tool=True))
        else:
            found.append(Shown(None, where, shows=False))
    return found


def _call_of(item: CallItem | ShellCallItem) -> dict[str, Any]:
    if isinstance(item, ShellCallItem):
        function = {"name": "local_shell", "arguments": json.dumps(item.action)}
    else:
        function = {"name": offered_name(item.name, item.namespace), "arguments": ""}
    if isinstance(item, FunctionCallItem):
        function["arguments"] = item.arguments
    elif isinstance(item, CustomCallItem):
        function["arguments"] = custom_arguments(item.input)
    return {"id": item.call_id or "", "type": "function", "function": function}


def _whole(turn: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The assistant's turn; none if it is empty."""
    if turn:
        yield {"role": "assistant", "content": "", **turn}


def _text_of(content: Content) -> Turned:
    if isinstance(content, str):
        return content
    return joined_parts(_part(part) for part in content)


def _part(part: Part | Refusal | MediaPart) -> str | MediaPart:
    if isinstance(part, MediaPart):
        return part
    return part.text if isinstance(part, Part) else part.refusal


def _output_of(output: str | Sequence[Any] | dict[str, Any]) -> Turned:
    if isinstance(output, str):
        return output
    if isinstance(output, dict):
        return json.dumps(output, ensure_ascii=False)
    return joined_parts(
        part if isinstance(part, MediaPart) else _other_text(part) for part in output
    )


def _other_text(part: Any) -> str:
    if isinstance(part, Part | Refusal):
        return str(_part(part))
    return json.dumps(part, ensure_ascii=False)
