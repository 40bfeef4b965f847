"""The object of /v1/responses."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lowbit.runtime.serve.collected import Collected
from lowbit.runtime.serve.identity import new_id
from lowbit.runtime.serve.job import AnswerToken, End
from lowbit.runtime.serve.logprobs import of_chat
from lowbit.runtime.serve.schemas.responses import ResponsesBody
from lowbit.runtime.serve.usage import usage_of
from lowbit.runtime.state.sampling import SamplingParams
from lowbit.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """Parts of a response that are known before its answer.

    Attributes:
        id: of the response.
        created: time of the request.
        body: of the request.
        sampling: settings in use.
        prompt_tokens: length of the prompt.
    """

    id: str
    created: int
    body: ResponsesBody
    sampling: SamplingParams
    prompt_tokens: int

    def begun(self) -> dict[str, Any]:
        """The object while the answer is made."""
        return self._fields("in_progress", [], None, None, None)

    def ended(self, output: list[dict[str, Any]], end: End) -> dict[str, Any]:
        """The object with its answer."""
        usage = usage_of(self.prompt_tokens, [end]).responses()
        if end.reason == "length":
            details = {"reason": "max_output_tokens"}
            return self._fields("incomplete", output, usage, details, None)
        return self._fields("completed", output, usage, None, None)

    def failed(self, message: str) -> dict[str, Any]:
        """The object of an answer that failed."""
        error = {"code": "server_error", "message": message}
        return self._fields("failed", [], None, None, error)

    def _fields(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: dict[str, Any] | None,
        incomplete: dict[str, Any] | None,
        error: dict[str, Any] | None,
    ) -> dict[str, Any]:
        body, sampling = self.body, self.sampling
        given = body.model_dump(by_alias=True, exclude_none=True, include=ECHOED)
        effort = None if body.reasoning is None else body.reasoning.effort
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "incomplete_details": incomplete,
            "model": body.model,
            "previous_response_id": None,
            "instructions": body.instructions,
            "output": output,
            "error": error,
            "tools": [_tool(tool) for tool in given.get("tools", ())],
            "tool_choice": given.get("tool_choice", "auto"),
            "truncation": "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": given.get("text", {}).get("format", {"type": "text"})},
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "top_logprobs": body.top_logprobs or 0,
            "temperature": sampling.temperature,
            "reasoning": {"effort": effort, "summary": None},
            "usage": usage,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": body.metadata or {},
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
        }


ECHOED = {"tools", "tool_choice", "text"}


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    """A tool with all fields that clients expect."""
    return {"description": None, "parameters": None, "strict": None, **given}


def output_of(one: Collected, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Items of an answer."""
    if one.reasoning:
        yield reasoning_item(new_id("rs_"), one.reasoning)
    if one.content or not one.calls:
        status = "incomplete" if one.end.reason == "length" else "completed"
        part = text_part(one.content, tokenizer, one.tokens)
        yield message_item(new_id("msg_"), [part], status)
    for call in one.calls:
        yield call_item(new_id("fc_"), call.id, call.name, call.arguments, "completed")


def reasoning_item(id: str, text: str) -> dict[str, Any]:
    """An item with reasoning; without text it is one that begins."""
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
        "logprobs": of_chat(tokenizer, tokens),
    }


def call_item(id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    """An item with a call."""
    return {
        "type": "function_call",
        "id": id,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }
