"""POST /v1/completions."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.answer_format import format_of
from lowbit.runtime.serve.body import read_body
from lowbit.runtime.serve.collected import Collected, collect
from lowbit.runtime.serve.errors import ApiError, invalid
from lowbit.runtime.serve.identity import new_id
from lowbit.runtime.serve.job import Ask, End, Update
from lowbit.runtime.serve.logprobs import TextLogprobs
from lowbit.runtime.serve.openapi import documented
from lowbit.runtime.serve.prepare import copies, tokens_of
from lowbit.runtime.serve.record import record_of
from lowbit.runtime.serve.restrict import constraint_of_format
from lowbit.runtime.serve.route import DirectRoute
from lowbit.runtime.serve.sampling_fields import wanted_of
from lowbit.runtime.serve.schemas.completions import CompletionBody
from lowbit.runtime.serve.schemas.formats import FormatFields
from lowbit.runtime.serve.service import Service, service_of
from lowbit.runtime.serve.sse import DONE, EventStream, compact, event
from lowbit.runtime.serve.usage import usage_of
from lowbit.runtime.text.reasoning import Piece

router = APIRouter(route_class=DirectRoute)


@router.post("/v1/completions", **documented(CompletionBody, "completions"))
async def create(request: Request) -> Response:
    """Continue texts, or token ids, as they are."""
    service = service_of(request)
    body = await read_body(request, CompletionBody, service.executor, service.crowd)
    service.check_model(body.model)
    record = record_of(request)
    record.ignored, record.stream = body.ignored(), bool(body.stream)
    service.check_open(body.n or 1)
    limited = any(getattr(body, name) is not None for name in FormatFields.model_fields)
    asks = await service.in_thread(lambda: asks_of(service.model, body), limited)
    prompts = [list(ask.tokens.request.prompt) for ask in asks[:: body.n or 1]]
    record.prompt_tokens = sum(map(len, prompts))
    head = {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }
    answers = service.begin(request, asks, record)
    if body.stream:
        return EventStream(answers, CompletionEvents(head, body, service, prompts))
    found = await collect(answers)
    return JSONResponse(
        {
            **head,
            "choices": [
                _choice(service.model, body, prompts[i // (body.n or 1)], i, one)
                for i, one in enumerate(found)
            ],
            "usage": usage_of(record.prompt_tokens, (one.end for one in found)).openai(),
        }
    )


def prompts_of(model: Model, body: CompletionBody) -> list[list[int]]:
    """Token ids of every prompt.

    Raises:
        RequestError: a prompt that cannot be run.
    """
    given = body.prompt
    if isinstance(given, str):
        return [model.encode(given, raw=True)]
    if isinstance(given[0], int):
        return [given]
    if isinstance(given[0], str):
        return [model.encode(text, raw=True) for text in given]
    return given


def asks_of(model: Model, body: CompletionBody) -> list[Ask]:
    """Everything that the engine is asked for, the answers to a prompt one after another.

    Raises:
        RequestError, ApiError: the body cannot be served.
    """
    most = 16 if body.max_tokens is None else body.max_tokens  # as OpenAI has it
    if most == 0 and not body.echo:
        raise invalid("`max_tokens` must be at least 1, or 0 with `echo`", "max_tokens")
    wanted = wanted_of(body, most, body.logprobs)
    if body.echo and (body.logprobs is not None or most == 0):
        wanted = replace(wanted, prompt_logprobs=body.logprobs or 0)
    new_constraint = constraint_of_format(model, format_of(body))
    asks = [
        Ask(tokens_of(model, ids, wanted), "raw", wanted.stops) for ids in prompts_of(model, body)
    ]
    return [one for ask in asks for one in copies(ask, wanted.count, new_constraint)]


def _choice(
    model: Model, body: CompletionBody, prompt: list[int], index: int, one: Collected
) -> dict[str, Any]:
    text = model.tokenizer.decode(prompt) + one.content if body.echo else one.content
    logprobs = None
    if body.logprobs is not None:
        logprobs = TextLogprobs(model.tokenizer)
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


class CompletionEvents:
    """Chunks of a streamed completion."""

    def __init__(
        self,
        head: dict[str, Any],
        body: CompletionBody,
        service: Service,
        prompts: Sequence[list[int]],
    ) -> None:
        """Nothing is written yet.

        Args:
            head: fields of every chunk.
            body: of the request.
            service: that makes the answers.
            prompts: token ids of every prompt.
        """
        self._head = f"data: {json.dumps(head, separators=(',', ':'))[:-1]}"
        self._prompt_tokens = sum(map(len, prompts))
        asked = [prompt for prompt in prompts for _ in range(body.n or 1)]
        self._echoes = dict(enumerate(asked)) if body.echo else {}  # prompts not sent yet
        wanted = body.logprobs is not None
        self._tokenizer = service.model.tokenizer
        self._logprobs = [TextLogprobs(self._tokenizer) for _ in asked] if wanted else []
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._tail = ',"usage":null}\n\n' if self._with_usage else "}\n\n"
        self._ends: list[End] = []

    def open(self) -> bytes:
        """Nothing stands before the text."""
        return b""

    def write(self, updates: Sequence[Update]) -> bytes:
        """Chunks with text."""
        return b"".join([self._update(update) for update in updates])

    def _update(self, update: Update) -> bytes:
        data = self._echo(update)
        text = "".join(piece.text for piece in update.events if isinstance(piece, Piece))
        logprobs = None
        if self._logprobs and update.tokens:
            found = self._logprobs[update.index]
            found.clear()
            found.add(update.tokens)
            logprobs = found.fields()
        if text or logprobs:
            data += self._chunk(update.index, text, None, logprobs)
        if update.end is not None:
            self._ends.append(update.end)
            data += self._chunk(update.index, "", update.end.reason, None)
        return data

    def _echo(self, update: Update) -> bytes:
        """The prompt, before the first news of an answer."""
        prompt = self._echoes.pop(update.index, None)
        if prompt is None or update.error is not None:
            return b""
        logprobs = None
        if self._logprobs:
            found = self._logprobs[update.index]
            for id, value in zip(prompt, update.prompt, strict=True):
                found.add_one(id, value)
            logprobs = found.fields()
        return self._chunk(update.index, self._tokenizer.decode(prompt), None, logprobs)

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
        self, index: int, text: str, finish: str | None, logprobs: dict[str, Any] | None
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        rendered = compact(choice)
        return f'{self._head},"choices":[{rendered}]{self._tail}'.encode()
