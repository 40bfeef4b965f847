"""Events of a streamed message, as Anthropic sends them."""

from collections.abc import Sequence
from typing import Any, Literal

from lowbit.runtime.serve.chat_events import joined
from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.job import End, Update
from lowbit.runtime.serve.sse import event
from lowbit.runtime.serve.usage import usage_of
from lowbit.runtime.text.reasoning import Piece
from lowbit.runtime.text.tool_calls import Event, ToolCallStart

BlockKind = Literal["text", "thinking", "tool_use"]


class MessageEvents:
    """Writes the events of one response: a block for the reasoning, the text and each call."""

    def __init__(self, head: dict[str, Any], prompt_tokens: int) -> None:
        """Nothing is written yet.

        Args:
            head: fields of the message.
            prompt_tokens: length of the prompt.
        """
        self._head, self._prompt_tokens = head, prompt_tokens
        self._kind: BlockKind | None = None  # of the open block
        self._index = -1
        self._begun = False
        self._end = End("length")

    def open(self) -> bytes:
        """Nothing: the message begins with the first update, which knows the cached tokens."""
        return b""

    def write(self, updates: Sequence[Update]) -> bytes:
        """Events of new text and calls."""
        data = b""
        for update in updates:
            if not self._begun:
                data += self._start(update.cached_tokens)
            for found in joined(update.events):
                data += self._event(found)
            if update.end is not None:
                self._end = update.end
        return data

    def close(self) -> bytes:
        """The end of the last block and of the message."""
        data = b"" if self._index >= 0 else self._open("text", {"type": "text", "text": ""})
        data += self._close_block()
        delta = {
            "stop_reason": self._end.message_reason,
            "stop_sequence": self._end.stop,
            "stop_details": None,
            "container": None,
        }
        usage = usage_of(self._prompt_tokens, [self._end]).anthropic()
        content = {"type": "message_delta", "delta": delta, "usage": usage}
        data += event(content, "message_delta")
        return data + event({"type": "message_stop"}, "message_stop")

    def fail(self, error: ApiError) -> bytes:
        """The error."""
        return event(error.anthropic(), "error")

    def _start(self, cached: int) -> bytes:
        self._begun = True
        begun = End("length", cached_tokens=cached)
        message = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
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
            block |= {"type": "tool_use", "caller": {"type": "direct"}}
            return data + self._open("tool_use", block)
        return self._delta({"type": "input_json_delta", "partial_json": found.fragment})

    def _open(self, kind: BlockKind, block: dict[str, Any]) -> bytes:
        """Begin a block, unless one of its kind is open."""
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
