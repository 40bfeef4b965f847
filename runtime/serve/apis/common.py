"""Parts that several APIs share: routes, token counts, log-probabilities, chunks of streams."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Response
from fastapi.routing import APIRoute
from starlette.requests import Request as HttpRequest

from lowbit.runtime.engine.delta import AnswerToken, Delta, End
from lowbit.runtime.serve.answers import compact, event
from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.request.body import SamplingBody
from lowbit.runtime.text.tokenizer import Tokenizer, bytes_to_text

DONE = b"data: [DONE]\n\n"


class DirectRoute(APIRoute):
    """A route that calls its endpoint with the request alone and returns its response.

    FastAPI's own route looks for a body and dependencies, a quarter of its time for a request.
    """

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        endpoint: Callable[[HttpRequest], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


def new_id(prefix: str) -> str:
    """A random id, such as `chatcmpl-0f3a...`."""
    return f"{prefix}{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt: int
    cached: int  # prompt tokens that the cache held
    new: int
    reasoning: int  # new tokens that are reasoning

    def openai(self) -> dict[str, Any]:
        """`usage` of chat and completions."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.new,
            "total_tokens": self.prompt + self.new,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def anthropic(self) -> dict[str, Any]:
        """`usage` of messages, whose input tokens are those that the cache did not hold."""
        return {
            "input_tokens": self.prompt - self.cached,
            "output_tokens": self.new,
            "cache_read_input_tokens": self.cached,
            "cache_creation_input_tokens": 0,
            "cache_creation": None,
            "inference_geo": None,
            "output_tokens_details": {"thinking_tokens": self.reasoning},
            "server_tool_use": None,
            "service_tier": "standard",
        }

    def responses(self) -> dict[str, Any]:
        """`usage` of responses."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.new,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.new,
        }


def usage_of(prompt_tokens: int, ends: Iterable[End]) -> Usage:
    """Token counts of a request whose answers have ended."""
    found = list(ends)
    return Usage(
        prompt=prompt_tokens,
        cached=min(prompt_tokens, max((end.cached_tokens for end in found), default=0)),
        new=sum(end.new_tokens for end in found),
        reasoning=sum(end.reasoning_tokens for end in found),
    )


LEAST = -9999.0  # stands for minus infinity, which JSON cannot write


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[AnswerToken]) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat, without the tokens of the reasoning."""
    return [
        {
            **_token(tokenizer, token.id, token.found.chosen),
            "top_logprobs": [_token(tokenizer, id, value) for id, value in token.found.top],
        }
        for token in tokens
        if not token.reasoning
    ]


def token_text(tokenizer: Tokenizer, id: int) -> str:
    """Text of a single token, or its name where it is special."""
    return bytes_to_text(tokenizer.token_bytes(id)) or tokenizer.text.hub.id_to_token(id) or ""


def finite(value: float) -> float:
    """The value, or LEAST for minus infinity."""
    return max(value, LEAST)


def _token(tokenizer: Tokenizer, id: int, value: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(id)
    return {
        "token": token_text(tokenizer, id),
        "logprob": finite(value),
        "bytes": list(data),
    }


class ChunkWriter(ABC):
    """Writes the chunks of a streamed chat or completion, as OpenAI's API has them."""

    def __init__(self, head: dict[str, Any], body: SamplingBody, prompt_tokens: int) -> None:
        """Prepare the parts that all chunks share."""
        self._head = f"data: {compact(head)[:-1]}"
        self._prompt_tokens = prompt_tokens
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._tail = ',"usage":null}\n\n' if self._with_usage else "}\n\n"
        self._ends: list[End] = []

    def open(self) -> bytes:
        """Chunks before the first delta: none."""
        return b""

    def write(self, deltas: Sequence[Delta]) -> bytes:
        """Chunks for deltas."""
        return b"".join([self.update(delta) for delta in deltas])

    @abstractmethod
    def update(self, delta: Delta) -> bytes:
        """Chunks for one delta."""

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """A chunk with one choice."""
        return f'{self._head},"choices":[{compact(choice)}]{self._tail}'.encode()

    def count(self, end: End) -> None:
        """Keep the end of an answer for the usage."""
        self._ends.append(end)

    def close(self) -> bytes:
        """The chunk with the usage, if the request asks for it, and the end of the stream."""
        if not self._with_usage:
            return DONE
        usage = usage_of(self._prompt_tokens, self._ends).openai()
        return f'{self._head},"choices":[],"usage":{compact(usage)}}}\n\n'.encode() + DONE

    def fail(self, error: ApiError) -> bytes:
        """The error and the end of the stream."""
        return event(error.openai()) + DONE
