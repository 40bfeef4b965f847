"""The object of /v1/responses, and the events of a streamed one."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lowbit.runtime.engine.delta import AnswerToken, Delta, End
from lowbit.runtime.serve.answers import Collected, event, joined
from lowbit.runtime.serve.apis.common import chat_logprobs, new_id, usage_of
from lowbit.runtime.serve.apis.tools import OfferedTool, custom_input
from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.text.answer import Event, Piece, ToolCallStart
from lowbit.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """The response object; all but the answer is known from the start."""

    begun: dict[str, Any]  # the object while the answer is generated
    prompt_tokens: int
    # Tools that may be called, by the name that the model knows
    tools: Mapping[str, OfferedTool] = field(default_factory=dict)

    def ended(self, output: list[dict[str, Any]], end: End) -> dict[str, Any]:
        """The object with its answer."""
        complete = end.reason != "length"
        return self.begun | {
            "completed_at": int(time.time()) if complete else None,
            "status": "completed" if complete else "incomplete",
            "incomplete_details": None if complete else {"reason": "max_output_tokens"},
            "output": output,
            "usage": usage_of(self.prompt_tokens, [end]).responses(),
        }

    def failed(self, message: str) -> dict[str, Any]:
        """The object of an answer that failed."""
        error = {"code": "server_error", "message": message}
        return self.begun | {"status": "failed", "error": error}


def output_of(
    one: Collected, tokenizer: Tokenizer, tools: Mapping[str, OfferedTool]
) -> Iterator[dict[str, Any]]:
    """Output items of an answer; see `ResponseObject` for `tools`."""
    if one.reasoning:
        yield reasoning_item(new_id("rs_"), one.reasoning)
    if one.content or not (one.reasoning or one.calls):
        cut = one.end.reason == "length" and not one.calls
        status = "incomplete" if cut else "completed"
        part = text_part(one.content, tokenizer, one.tokens)
        yield message_item(new_id("msg_"), [part], status)
    for call in one.calls:
        tool = tools.get(call.name, OfferedTool({}, call.name))
        status = "completed" if call.complete else "incomplete"
        yield call_item(call_item_id(tool), call.id, tool, call.arguments, status)


def reasoning_item(id: str, text: str) -> dict[str, Any]:
    """An item with reasoning; without content if the text is empty, as it begins."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "id": id, "summary": [], "content": content}


def message_item(id: str, parts: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """An item with the text of the answer."""
    return {
        "type": "message",
        "id": id,
        "status": status,
        "role": "assistant",
        "content": parts,
    }


def text_part(
    text: str, tokenizer: Tokenizer, tokens: Sequence[AnswerToken] = ()
) -> dict[str, Any]:
    """The text of a message item."""
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": chat_logprobs(tokenizer, tokens),
    }


def call_item_id(tool: OfferedTool) -> str:
    """A random id for a call of a tool."""
    return new_id("ctc_" if tool.custom else "fc_")


def call_item(
    id: str, call_id: str, tool: OfferedTool, arguments: str, status: str
) -> dict[str, Any]:
    """An item with a call."""
    item = {"id": id, "call_id": call_id, "name": tool.name, "status": status}
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    if tool.custom:
        return {"type": "custom_tool_call", **item, "input": custom_input(arguments)}
    return {"type": "function_call", **item, "arguments": arguments}


ItemKind = Literal["reasoning", "message", "call"]


@dataclass(slots=True)
class OpenItem:
    """An output item that is not complete."""

    kind: ItemKind
    id: str
    text: str = ""  # text so far, or arguments of a call so far
    call_id: str = ""  # id of the call, for a call
    tool: OfferedTool = field(default_factory=lambda: OfferedTool({}, ""))
    # False for a call whose arguments are not all there, and for a text that was cut
    complete: bool = True
    tokens: list[AnswerToken] = field(default_factory=list)


class ResponseEvents:
    """Writes the events of a streamed response."""

    def __init__(self, made: ResponseObject, tokenizer: Tokenizer) -> None:
        """Start before the first event."""
        self._made, self._tokenizer = made, tokenizer
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._item: OpenItem | None = None
        self._end = End("length")

    def open(self) -> bytes:
        """Events with the response as it begins."""
        begun = self._made.begun
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def write(self, deltas: Sequence[Delta]) -> bytes:
        """Events for new text and calls."""
        data = b""
        for delta in deltas:
            tokens = [token for token in delta.tokens if not token.reasoning]
            for found in joined(delta.events):
                data += self._found(found, tokens)
            if delta.end is not None:
                self._end = delta.end
        return data

    def close(self) -> bytes:
        """Events that end the last item and the response."""
        data = b""
        if self._item is None and not self._output:
            data += self._open(OpenItem("message", new_id("msg_")))
        if self._item is not None and self._item.kind == "message":
            self._item.complete = self._end.reason != "length"
        data += self._close_item()
        made = self._made.ended(self._output, self._end)
        return data + self._event(f"response.{made['status']}", response=made)

    def fail(self, error: ApiError) -> bytes:
        """The event with the failed response."""
        return self._event("response.failed", response=self._made.failed(error.message))

    def _found(self, found: Event, tokens: list[AnswerToken]) -> bytes:
        if isinstance(found, Piece):
            kind: ItemKind = "reasoning" if found.reasoning else "message"
            data = self._switch(kind)
            return data + self._text(found.text, [] if found.reasoning else tokens)
        if isinstance(found, ToolCallStart):
            tool = self._made.tools.get(found.name, OfferedTool({}, found.name))
            item = OpenItem("call", call_item_id(tool), call_id=found.id, tool=tool)
            item.complete = False
            return self._close_item() + self._open(item)
        if self._item is not None:
            self._item.complete = found.last
        return self._text(found.fragment, [])

    def _switch(self, kind: ItemKind) -> bytes:
        if self._item is not None and self._item.kind == kind:
            return b""
        prefix = "rs_" if kind == "reasoning" else "msg_"
        return self._close_item() + self._open(OpenItem(kind, new_id(prefix)))

    def _open(self, item: OpenItem) -> bytes:
        self._item = item
        data = self._event("response.output_item.added", item=self._rendered(item, "in_progress"))
        if item.kind == "call":
            return data
        part = self._part(OpenItem(item.kind, item.id))
        return data + self._event("response.content_part.added", content_index=0, part=part)

    def _text(self, text: str, tokens: list[AnswerToken]) -> bytes:
        item = self._item
        if item is None:
            return b""
        item.text += text
        item.tokens += tokens
        if item.kind == "call":
            if item.tool.custom:  # its text is known at the end of the arguments
                return b""
            return self._event("response.function_call_arguments.delta", delta=text)
        if item.kind == "reasoning":
            return self._event("response.reasoning_text.delta", content_index=0, delta=text)
        logprobs = chat_logprobs(self._tokenizer, tokens)
        tokens.clear()  # they belong to the first text of the delta
        return self._event(
            "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs
        )

    def _close_item(self) -> bytes:
        item = self._item
        if item is None:
            return b""
        if item.kind == "call" and item.tool.custom:
            text = custom_input(item.text)
            data = self._event("response.custom_tool_call_input.delta", delta=text)
            data += self._event("response.custom_tool_call_input.done", input=text)
        elif item.kind == "call":
            data = self._event(
                "response.function_call_arguments.done", arguments=item.text, name=item.tool.name
            )
        elif item.kind == "reasoning":
            data = self._event("response.reasoning_text.done", content_index=0, text=item.text)
        else:
            logprobs = chat_logprobs(self._tokenizer, item.tokens)
            data = self._event(
                "response.output_text.done", content_index=0, text=item.text, logprobs=logprobs
            )
        if item.kind != "call":
            part = self._part(item)
            data += self._event("response.content_part.done", content_index=0, part=part)
        rendered = self._rendered(item, "completed" if item.complete else "incomplete")
        data += self._event("response.output_item.done", item=rendered)
        self._output.append(rendered)
        self._item = None
        return data

    def _part(self, item: OpenItem) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        return text_part(item.text, self._tokenizer, item.tokens)

    def _rendered(self, item: OpenItem, status: str) -> dict[str, Any]:
        if item.kind == "reasoning":
            return reasoning_item(item.id, item.text)
        if item.kind == "call":
            return call_item(item.id, item.call_id, item.tool, item.text, status)
        parts = [self._part(item)] if status != "in_progress" else []
        return message_item(item.id, parts, status)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """A numbered event, with the place of the item that it belongs to."""
        place: dict[str, Any] = {}
        if self._item is not None and "response" not in fields:
            place["output_index"] = len(self._output)
            if "item" not in fields:
                place["item_id"] = self._item.id
        content = {"type": kind, "sequence_number": self._number, **place, **fields}
        self._number += 1
        return event(content, kind)
