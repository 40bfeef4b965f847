"""POST /v1/responses: OpenAI's responses, without anything that would have to be stored."""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.requests import Request as HttpRequest

from lowbit.runtime.serve.answers import EventStream, collect
from lowbit.runtime.serve.apis.common import DirectRoute, new_id
from lowbit.runtime.serve.apis.docs import documented
from lowbit.runtime.serve.apis.response_events import ResponseEvents, ResponseObject, output_of
from lowbit.runtime.serve.apis.response_items import Items, left_out_items, shown_by, turns_of
from lowbit.runtime.serve.apis.tools import (
    ChosenTool,
    Tools,
    choice_of,
    offered_tools,
    skipped_tools,
)
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.body import (
    NEUTRAL,
    PLAIN,
    TURNS,
    AnswerBody,
    DrawFields,
    Ignored,
    SettingsBody,
)
from lowbit.runtime.serve.request.contents import Content
from lowbit.runtime.serve.request.forms import (
    AnswerFormat,
    FlatSchemaFormat,
    JsonObjectFormat,
    TextFormat,
    schema_format,
)
from lowbit.runtime.serve.request.images import read_images
from lowbit.runtime.serve.request.prepare import (
    Asked,
    can_switch_thinking,
    count_prompt,
    effort_switch,
    open_answers,
    unheard_switch,
)
from lowbit.runtime.serve.served_model import ServedModel
from lowbit.runtime.state.sampling_params import SamplingParams


class TextConfig(SettingsBody):
    """`text`."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Ignored[Any] = None


class ReasoningConfig(SettingsBody):
    """`reasoning`."""

    effort: str | None = None  # see `effort_switch`
    summary: Ignored[Any] = None
    generate_summary: Ignored[Any] = None
    context: Ignored[Any] = None


class ResponsesStreamOptions(SettingsBody):
    """`stream_options`."""

    include_obfuscation: Ignored[bool | None] = None


LOGPROBS = "message.output_text.logprobs"
INCLUDES = ("reasoning.encrypted_content", LOGPROBS)


class ResponsesBody(DrawFields, AnswerBody):
    """The whole body; nothing is stored, so nothing of an earlier response can be named."""

    NEUTRAL = NEUTRAL | TURNS | PLAIN
    input: str | Items
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[str], Field(fail_fast=True, max_length=16)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    enable_thinking: bool | None = None
    stream_options: Ignored[ResponsesStreamOptions | None] = None
    truncation: Literal["disabled", "auto"] | None = None
    background: Ignored[Literal[False] | None] = None
    metadata: Ignored[dict[str, Any] | None] = None
    max_tool_calls: Ignored[int | None] = None
    user: Ignored[Any] = None
    store: Ignored[Any] = None
    service_tier: Ignored[Any] = None
    safety_identifier: Ignored[str | None] = None
    prompt_cache_key: Ignored[str | None] = None
    prompt_cache_retention: Ignored[Any] = None
    prompt_cache_options: Ignored[Any] = None
    client_metadata: Ignored[Any] = None

    def contents(self) -> list[Content]:
        """See `ModelBody.contents`."""
        return [] if isinstance(self.input, str) else shown_by(self.input)


router = APIRouter(route_class=DirectRoute)


@router.post("/v1/responses", **documented(ResponsesBody, "responses"))
async def create(http: HttpRequest) -> Response:
    """Answer a conversation."""
    body, answers = await open_answers(http, ResponsesBody, asked_of)
    begun = _begun(body, answers.each[0].request.sampling)
    made = ResponseObject(begun, answers.record.prompt_tokens, offered_tools(body.tools))
    if body.stream:
        return EventStream(answers, ResponseEvents(made, answers.tokenizer))
    [one] = await collect(answers)
    output = list(output_of(one, answers.tokenizer, made.tools))
    return JSONResponse(made.ended(output, one.end))


@router.post("/v1/responses/input_tokens", **documented(ResponsesBody, "responses"))
async def count_tokens(http: HttpRequest) -> Response:
    """Tokens of the prompt."""
    count = await count_prompt(http, ResponsesBody, asked_of)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


ECHOED = {"tools", "tool_choice", "text"}


def _begun(body: ResponsesBody, sampling: SamplingParams) -> dict[str, Any]:
    """The response object before its answer."""
    given = body.model_dump(by_alias=True, exclude_none=True, include=ECHOED)
    tool = {"description": None, "parameters": None, "strict": None}  # clients expect all fields
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "incomplete_details": None,
        "model": body.model,
        "previous_response_id": None,
        "instructions": body.instructions,
        "output": [],
        "error": None,
        "tools": [
            tool | each if each["type"] == "function" else each for each in given.get("tools", ())
        ],
        "tool_choice": given.get("tool_choice", "auto"),
        "truncation": body.truncation or "disabled",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": given.get("text", {}).get("format", {"type": "text"})},
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "top_logprobs": body.top_logprobs or 0,
        "temperature": sampling.temperature,
        "reasoning": {
            "effort": None if body.reasoning is None else body.reasoning.effort,
            "summary": None,
        },
        "usage": None,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "store": False,
        "background": False,
        "service_tier": "default",
        "metadata": body.metadata or {},
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


def asked_of(model: ServedModel, body: ResponsesBody) -> Asked:
    """The request of a body.

    Raises:
        ApiError: tools of the same name, or an image that cannot be read.
    """
    logged = LOGPROBS in (body.include or ())
    if body.top_logprobs and not logged:
        raise invalid(f"`top_logprobs` needs `{LOGPROBS}` in `include`", "top_logprobs")
    choice, named, tools, left_out = choice_of(body.tool_choice, offered_tools(body.tools))
    left_out += skipped_tools(body.tools) + unheard_switch(model, body.enable_thinking)
    left_out += [f"include {name}" for name in body.include or () if name not in INCLUDES]
    if not isinstance(body.input, str):
        left_out += left_out_items(body.input)
        left_out += read_images(body.contents(), model.prompts)
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += [*turns_of(body.input)] or [{"role": "user", "content": ""}]
    switch = body.enable_thinking
    if switch is None and body.reasoning is not None:
        switch = effort_switch(body.reasoning.effort)
    return Asked(
        messages=messages,
        tools=[{"type": "function", "function": tool.function} for tool in tools],
        choice=choice,
        tool=named,
        parallel=body.parallel_tool_calls is not False,
        format=_format_of(body),
        truncate=body.truncation == "auto",
        thinking=switch if can_switch_thinking(model) else None,
        left_out=left_out,
        sampling=body.sampling(),
        max_new_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if logged else None,
    )


def _format_of(body: ResponsesBody) -> AnswerFormat | None:
    given = None if body.text is None else body.text.format
    if isinstance(given, FlatSchemaFormat):
        return schema_format(given.json_schema, "text.format.schema", given.strict)
    if isinstance(given, JsonObjectFormat):
        if given.json_schema is not None:
            return schema_format(given.json_schema, "text.format.schema")
        return AnswerFormat("json_object", param="text.format")
    return None
