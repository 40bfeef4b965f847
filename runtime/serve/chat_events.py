"""Chunks of a streamed chat, as OpenAI sends them."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.job import End, Update
from lowbit.runtime.serve.logprobs import of_chat
from lowbit.runtime.serve.schemas.chat import ChatBody
from lowbit.runtime.serve.sse import DONE, compact, event
from lowbit.runtime.serve.usage import usage_of
from lowbit.runtime.text.reasoning import Piece
from lowbit.runtime.text.tokenizer import Tokenizer
from lowbit.runtime.text.tool_calls import Event, ToolCallStart


class ChatEvents:
    """Writes the chunks of one response."""

    def __init__(
        self, head: dict[str, Any], body: ChatBody, tokenizer: Tokenizer, prompt_tokens: int
    ) -> None:
        """Nothing is written yet.

        Args:
            head: fields of every chunk.
            body: of the request.
            tokenizer: of the model.
            prompt_tokens: length of the prompt.
        """
        whole = {**head, "object": "chat.completion.chunk"}
        text = json.dumps(whole, separators=(",", ":"))
        self._head = f"data: {text[:-1]}"
        self._choices = body.n or 1
        self._tokenizer, self._prompt_tokens = tokenizer, prompt_tokens
        self._logprobs = bool(body.logprobs)
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._tail = ',"usage":null}\n\n' if self._with_usage else "}\n\n"
        self._ends: list[End] = []

    def open(self) -> bytes:
        """A chunk with the role for every choice."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(index, delta) for index in range(self._choices))

    def write(self, updates: Sequence[Update]) -> bytes:
        """Chunks with text, reasoning apart from content, and with calls."""
        return b"".join([self._update(update) for update in updates])

    def _update(self, update: Update) -> bytes:
        data = b""
        tokens = of_chat(self._tokenizer, update.tokens) if self._logprobs else []
        for found in joined(update.events):
            delta = _delta(found)
            if "content" in delta and tokens:
                data += self._chunk(update.index, delta, logprobs=tokens)
                tokens = []
            else:
                data += self._chunk(update.index, delta)
        if tokens:  # their text is held back
            data += self._chunk(update.index, {"content": ""}, logprobs=tokens)
        if update.end is not None:
            self._ends.append(update.end)
            data += self._chunk(update.index, {}, update.end.chat_reason)
        return data

    def close(self) -> bytes:
        """Usage, and the end."""
        if not self._with_usage:
            return DONE
        usage = usage_of(self._prompt_tokens, self._ends).openai()
        return f'{self._head},"choices":[],"usage":{json.dumps(usage)}}}\n\n'.encode() + DONE

    def fail(self, error: ApiError) -> bytes:
        """The error, and the end."""
        return event(error.openai()) + DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": finish,
        }
        text = compact(choice)
        return f'{self._head},"choices":[{text}]{self._tail}'.encode()


def _delta(found: Event) -> dict[str, Any]:
    if isinstance(found, Piece):
        if found.reasoning:
            return {"reasoning": found.text, "reasoning_content": found.text}
        return {"content": found.text}
    call: dict[str, Any] = {"index": found.index}
    if isinstance(found, ToolCallStart):
        function = {"name": found.name, "arguments": ""}
        call |= {"id": found.id, "type": "function", "function": function}
    else:
        call["function"] = {"arguments": found.fragment}
    return {"tool_calls": [call]}


def joined(events: Sequence[Event]) -> Iterator[Event]:
    """The same events, text of one kind in one piece."""
    if len(events) == 1:
        yield events[0]
        return
    held: Piece | None = None
    for found in events:
        if not isinstance(found, Piece):
            if held is not None:
                yield held
                held = None
            yield found
        elif held is not None and held.reasoning == found.reasoning:
            held = Piece(held.text + found.text, found.reasoning)
        else:
            if held is not None:
                yield held
            held = found
    if held is not None:
        yield held
