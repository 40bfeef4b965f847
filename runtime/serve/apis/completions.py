"""POST /v1/completions: OpenAI's completions of texts or token ids."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.requests import Request as HttpRequest

from lowbit.runtime.engine.delta import AnswerToken, Delta
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.serve.answers import Collected, EventStream, collect
from lowbit.runtime.serve.apis.common import (
    ChunkWriter,
    DirectRoute,
    finite,
    new_id,
    token_text,
    usage_of,
)
from lowbit.runtime.serve.apis.docs import documented
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.body import NEUTRAL, Ignored, SamplingBody, sampling_options
from lowbit.runtime.serve.request.forms import FormatFields, format_of
from lowbit.runtime.serve.request.prepare import Asked, open_answers
from lowbit.runtime.serve.served_model import ServedModel
from lowbit.runtime.serve.settings import MOST_IDS, MOST_PROMPTS
from lowbit.runtime.text.answer import Piece
from lowbit.runtime.text.tokenizer import Tokenizer

Ids = Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=MOST_IDS)]
Prompts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
IdPrompts = Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]


class CompletionBody(SamplingBody, FormatFields):
    """The whole body."""

    NEUTRAL = NEUTRAL | {"logprobs": (False,)}
    prompt: str | Prompts | Ids | IdPrompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: None = None
    best_of: Ignored[Annotated[int, Field(ge=1, le=1)] | None] = None
    add_special_tokens: Ignored[bool | None] = None


router = APIRouter(route_class=DirectRoute)


@router.post("/v1/completions", **documented(CompletionBody, "completions"))
async def create(http: HttpRequest) -> Response:
    """Continue texts, or token ids, as they are."""
    body, answers = await open_answers(http, CompletionBody, asked_of)
    tokenizer, prompt_tokens = answers.tokenizer, answers.record.prompt_tokens
    prompts = [list(each.request.prompt) for each in answers.each]
    head = {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }
    if body.stream:
        events = CompletionEvents(head, body, tokenizer, prompts, prompt_tokens)
        return EventStream(answers, events)
    found = await collect(answers)
    return JSONResponse(
        {
            **head,
            "choices": [
                _choice(tokenizer, body, prompts[i], i, one) for i, one in enumerate(found)
            ],
            "usage": usage_of(prompt_tokens, (one.end for one in found)).openai(),
        }
    )


def prompts_of(model: ServedModel, body: CompletionBody) -> list[list[int]]:
    """Token ids of every prompt.

    Raises:
        RequestError: a prompt cannot be encoded.
    """
    given = body.prompt
    if isinstance(given, str):
        return [model.prompts.encode(given, raw=True)]
    if isinstance(given[0], int):
        return [given]
    if isinstance(given[0], str):
        return [model.prompts.encode(text, raw=True) for text in given]
    return given


def asked_of(model: ServedModel, body: CompletionBody) -> Asked:
    """The request of a body.

    Raises:
        RequestError, ApiError: the body cannot be served.
    """
    most = 16 if body.max_tokens is None else body.max_tokens  # as OpenAI has it
    if most == 0 and not body.echo:
        raise invalid("`max_tokens` must be at least 1, or 0 with `echo`", "max_tokens")
    scored = body.echo and (body.logprobs is not None or most == 0)
    return Asked(
        prompts=prompts_of(model, body),
        format=format_of(body),
        prompt_logprobs=(body.logprobs or 0) if scored else None,
        **sampling_options(body, most, body.logprobs),
    )


def _choice(
    tokenizer: Tokenizer, body: CompletionBody, prompt: list[int], index: int, one: Collected
) -> dict[str, Any]:
    text = tokenizer.decode(prompt) + one.content if body.echo else one.content
    logprobs = None
    if body.logprobs is not None:
        logprobs = TextLogprobs(tokenizer)
        if body.echo:
            for id, found in zip(prompt, one.prompt, strict=True):
                logprobs.add_one(id, found)
        logprobs.add(one.tokens)
    return {
        "index": index,
        "text": text,
        "logprobs": None if logprobs is None else logprobs.fields(),
        "finish_reason": one.end.reason,
        "stop_reason": one.end.stop,
    }


class CompletionEvents(ChunkWriter):
    """Writes the chunks of a streamed completion."""

    def __init__(
        self,
        head: dict[str, Any],
        body: CompletionBody,
        tokenizer: Tokenizer,
        prompts: Sequence[list[int]],
        prompt_tokens: int,
    ) -> None:
        """Prepare the parts that all chunks share."""
        super().__init__(head, body, prompt_tokens)
        self._tokenizer = tokenizer
        self._echoes = dict(enumerate(prompts)) if body.echo else {}  # prompts not sent yet
        logged = () if body.logprobs is None else prompts
        self._logprobs = [TextLogprobs(tokenizer) for _ in logged]

    def update(self, delta: Delta) -> bytes:
        """Chunks with the prompt, where it is echoed, with text and with the end."""
        data = self._echo(delta)
        text = "".join(piece.text for piece in delta.events if isinstance(piece, Piece))
        logprobs = None
        if self._logprobs and delta.tokens:
            found = self._logprobs[delta.index]
            found.clear()
            found.add(delta.tokens)
            logprobs = found.fields()
        if text or logprobs:
            data += self._chunk(delta.index, text, None, logprobs)
        if delta.end is not None:
            self.count(delta.end)
            data += self._chunk(delta.index, "", delta.end.reason, None)
        return data

    def _echo(self, delta: Delta) -> bytes:
        prompt = self._echoes.pop(delta.index, None)
        if prompt is None or delta.error is not None:
            return b""
        logprobs = None
        if self._logprobs:
            found = self._logprobs[delta.index]
            for id, value in zip(prompt, delta.prompt, strict=True):
                found.add_one(id, value)
            logprobs = found.fields()
        return self._chunk(delta.index, self._tokenizer.decode(prompt), None, logprobs)

    def _chunk(
        self, index: int, text: str, finish: str | None, logprobs: dict[str, Any] | None
    ) -> bytes:
        return self.chunk(
            {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        )


@dataclass(slots=True)
class TextLogprobs:
    """`logprobs` of a completion, built token by token."""

    tokenizer: Tokenizer
    offset: int = 0  # characters of text before the next token
    _tokens: list[str] = field(default_factory=list)
    _chosen: list[float | None] = field(default_factory=list)
    _top: list[dict[str, float] | None] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Drop the tokens, which have been written; the offset stays."""
        for values in (self._tokens, self._chosen, self._top, self._offsets):
            values.clear()

    def add(self, tokens: Sequence[AnswerToken]) -> None:
        """Append new tokens."""
        for token in tokens:
            self.add_one(token.id, token.found)

    def add_one(self, id: int, found: TokenLogProbabilities | None) -> None:
        """Append a token; `found` is None for the first token of a prompt."""
        text = _name(self.tokenizer, id)
        self._tokens.append(text)
        self._offsets.append(self.offset)
        self.offset += len(text)
        if found is None:
            self._chosen.append(None)
            self._top.append(None)
            return
        self._chosen.append(finite(found.chosen))
        top = {_name(self.tokenizer, other): finite(value) for other, value in found.top}
        top.setdefault(text, finite(found.chosen))
        self._top.append(top)

    def fields(self) -> dict[str, Any]:
        """The object that the API has."""
        return {
            "tokens": list(self._tokens),
            "token_logprobs": list(self._chosen),
            "top_logprobs": list(self._top),
            "text_offset": list(self._offsets),
        }


def _name(tokenizer: Tokenizer, id: int) -> str:
    """Text of a single token; a part of a character as its bytes, as OpenAI writes it."""
    data = tokenizer.token_bytes(id)
    try:
        return data.decode() if data else token_text(tokenizer, id)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
