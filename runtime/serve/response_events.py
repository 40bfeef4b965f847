"""Events of a streamed response, as OpenAI sends them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lowbit.runtime.serve.chat_events import joined
from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.identity import new_id
from lowbit.runtime.serve.job import AnswerToken, End, Update
from lowbit.runtime.serve.logprobs import of_chat
from lowbit.runtime.serve.response_object import (
    ResponseObject,
    call_item,
    message_item,
    reasoning_item,
    text_part,
)
from lowbit.runtime.serve.sse import event
from lowbit.runtime.text.reasoning import Piece
from lowbit.runtime.text.tokenizer import Tokenizer
from lowbit.runtime.text.tool_calls import Event, ToolCallStart

ItemKind = Literal["reasoning", "message", "function_call"]


@dataclass(slots=True)
class OpenItem:
    """An output item that is being written.

    Attributes:
        kind: of item.
        id: of the item.
        text: so far; arguments of a call.
        call_id: of a call.
        name: of the function.
        complete: false for a call whose arguments are not all there.
        tokens: of the text, where log-probabilities are wanted.
    """

    kind: ItemKind
    id: str
    text: str = ""
    call_id: str = ""
    name: str = ""
    complete: bool = True
    tokens: list[AnswerToken] = field(default_factory=list)


class ResponseEvents:
    """Writes the events of one response."""

    def __init__(self, made: ResponseObject, tokenizer: Tokenizer) -> None:
        """Nothing is written yet."""
        self._made, self._tokenizer = made, tokenizer
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._item: OpenItem | None = None
        self._end = End("length")

    def open(self) -> bytes:
        """The response as it begins."""
        begun = self._made.begun()
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def write(self, updates: Sequence[Update]) -> bytes:
        """Events of new text and calls."""
        data = b""
        for update in updates:
            tokens = [token for token in update.tokens if not token.reasoning]
            for found in joined(update.events):
                data += self._found(found, tokens)
            if update.end is not None:
                self._end = update.end
        return data

    def close(self) -> bytes:
        """The end of the last item and of the response."""
        data = b""
        if self._item is None and not self._output:
            data += self._open(OpenItem("message", new_id("msg_")))
        data += self._close_item()
        made = self._made.ended(self._output, self._end)
        return data + self._event(f"response.{made['status']}", response=made)

    def fail(self, error: ApiError) -> bytes:
        """The response as it failed."""
        return self._event("response.failed", response=self._made.failed(error.message))

    def _found(self, found: Event, tokens: list[AnswerToken]) -> bytes:
        if isinstance(found, Piece):
            kind: ItemKind = "reasoning" if found.reasoning else "message"
            data = self._switch(kind)
            return data + self._text(found.text, [] if found.reasoning else tokens)
        if isinstance(found, ToolCallStart):
            item = OpenItem("function_call", new_id("fc_"), call_id=found.id, name=found.name)
            item.complete = False
            return self._close_item() + self._open(item)
        if self._item is not None:
            self._item.complete = found.last
        return self._text(found.fragment, [])

    def _switch(self, kind: ItemKind) -> bytes:
        """Begin an item, unless one of its kind is open."""
        if self._item is not None and self._item.kind == kind:
            return b""
        prefix = "rs_" if kind == "reasoning" else "msg_"
        return self._close_item() + self._open(OpenItem(kind, new_id(prefix)))

    def _open(self, item: OpenItem) -> bytes:
        self._item = item
        data = self._event("response.output_item.added", item=self._rendered(item, "in_progress"))
        if item.kind == "function_call":
            return data
        part = self._part(OpenItem(item.kind, item.id))
        return data + self._event("response.content_part.added", content_index=0, part=part)

    def _text(self, text: str, tokens: list[AnswerToken]) -> bytes:
        item = self._item
        if item is None:
            return b""
        item.text += text
        item.tokens += tokens
        if item.kind == "function_call":
            return self._event("response.function_call_arguments.delta", delta=text)
        if item.kind == "reasoning":
            return self._event("response.reasoning_text.delta", content_index=0, delta=text)
        logprobs = of_chat(self._tokenizer, tokens)
        tokens.clear()  # they belong to the first text of the update
        return self._event(
            "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs
        )

    def _close_item(self) -> bytes:
        item = self._item
        if item is None:
            return b""
        if item.kind == "function_call":
            data = self._event(
                "response.function_call_arguments.done", arguments=item.text, name=item.name
            )
        elif item.kind == "reasoning":
            data = self._event("response.reasoning_text.done", content_index=0, text=item.text)
        else:
            logprobs = of_chat(self._tokenizer, item.tokens)
            data = self._event(
                "response.output_text.done", content_index=0, text=item.text, logprobs=logprobs
            )
        if item.kind != "function_call":
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
        if item.kind == "function_call":
            return call_item(item.id, item.call_id, item.name, item.text, status)
        parts = [self._part(item)] if status == "completed" else []
        return message_item(item.id, parts, status)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """An event, numbered, with the place of the item that it belongs to."""
        place: dict[str, Any] = {}
        if self._item is not None and "response" not in fields:
            place["output_index"] = len(self._output)
            if "item" not in fields:
                place["item_id"] = self._item.id
        content = {"type": kind, "sequence_number": self._number, **place, **fields}
        self._number += 1
        return event(content, kind)
