"""The answer of /v1/messages: blocks of a message, and the events of a stream."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import TypeAdapter

from lowbit.runtime.engine.delta import Delta, End
from lowbit.runtime.serve.answers import Collected, event, joined
from lowbit.runtime.serve.apis.common import usage_of
from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.text.answer import Event, Piece, ToolCallStart

DIRECT = {"type": "direct"}  # the model called the tool itself


def content_of(one: Collected) -> Iterator[dict[str, Any]]:
    """Blocks of a whole answer."""
    if one.reasoning:
        yield {"type": "thinking", "thinking": one.reasoning, "signature": ""}
    if one.content or not (one.reasoning or one.calls):
        yield {"type": "text", "text": one.content, "citations": None}
    for call in one.calls:
        yield {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": _input_of(call.arguments),
            "caller": DIRECT,
        }


def _input_of(arguments: str) -> Any:
    """The arguments of a call; of one that was cut, those that are whole, as clients read them."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return TypeAdapter(Any).validate_json(arguments, experimental_allow_partial=True)


def ending_of(end: End | None) -> dict[str, Any]:
    """Fields of a message that say why it ended; None before its end."""
    reason, stop = (None, None) if end is None else (end.message_reason, end.stop)
    return {"stop_reason": reason, "stop_sequence": stop, "stop_details": None, "container": None}


BlockKind = Literal["text", "thinking", "tool_use"]


class MessageEvents:
    """Writes the events of a streamed message: a block for reasoning, one for text, one a call."""

    def __init__(self, head: dict[str, Any], prompt_tokens: int) -> None:
        """Start before the first event."""
        self._head, self._prompt_tokens = head, prompt_tokens
        self._kind: BlockKind | None = None  # of the open block
        self._index = -1
        self._begun = False
        self._end = End("length")

    def open(self) -> bytes:
        """No event: the message begins with the first delta, which knows the cached tokens."""
        return b""

    def write(self, deltas: Sequence[Delta]) -> bytes:
        """Events for new text and calls."""
        data = b""
        for delta in deltas:
            if not self._begun:
                data += self._start(delta.cached_tokens)
            for found in joined(delta.events):
                data += self._event(found)
            if delta.end is not None:
                self._end = delta.end
        return data

    def close(self) -> bytes:
        """Events that end the last block and the message."""
        data = b"" if self._index >= 0 else self._open("text", {"type": "text", "text": ""})
        data += self._close_block()
        usage = usage_of(self._prompt_tokens, [self._end]).anthropic()
        content = {"type": "message_delta", "delta": ending_of(self._end), "usage": usage}
        data += event(content, "message_delta")
        return data + event({"type": "message_stop"}, "message_stop")

    def fail(self, error: ApiError) -> bytes:
        """The event with the error."""
        return event(error.anthropic(), "error")

    def _start(self, cached: int) -> bytes:
        self._begun = True
        begun = End("length", cached_tokens=cached)
        message = {
            **self._head,
            "content": [],
            **ending_of(None),
            "usage": usage_of(self._prompt_tokens, [begun]).anthropic(),
        }
        return event({"type": "message_start", "message": message}, "message_start")

    def _event(self, found: Event) -> bytes:
        if isinstance(found, Piece):
            if found.reasoning:
                thinking = {"type": "thinking", "thinking": "", "signature": ""}
                data = self._open("thinking", thinking)
                return data + self._delta({"type": "thinking_delta", "thinking": found.text})
            data = self._open("text", {"type": "text", "text": ""})
            return data + self._delta({"type": "text_delta", "text": found.text})
        if isinstance(found, ToolCallStart):
            data = self._close_block()
            block: dict[str, Any] = {"id": found.id, "name": found.name, "input": {}}
            block |= {"type": "tool_use", "caller": DIRECT}
            return data + self._open("tool_use", block)
        return self._delta({"type": "input_json_delta", "partial_json": found.fragment})

    def _open(self, kind: BlockKind, block: dict[str, Any]) -> bytes:
        if self._kind == kind:
            return b""
        data = self._close_block()
        self._kind, self._index = kind, self._index + 1
        content = {"type": "content_block_start", "index": self._index, "content_block": block}
        return data + event(content, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        content = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return event(content, "content_block_delta")

    def _close_block(self) -> bytes:
        if self._kind is None:
            return b""
        data = b""
        if self._kind == "thinking":
            data = self._delta({"type": "signature_delta", "signature": ""})
        self._kind = None
        content = {"type": "content_block_stop", "index": self._index}
        return data + event(content, "content_block_stop")
