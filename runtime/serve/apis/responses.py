"""POST /v1/responses: OpenAI's responses, without anything that would have to be stored."""

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Discriminator, Field, Tag

from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.answers import collect
from lowbit.runtime.serve.apis.common import DirectRoute, documented, new_id
from lowbit.runtime.serve.apis.response_events import ResponseEvents, ResponseObject, output_of
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.conversation import (
    AnswerFormat,
    AnswerOptions,
    Conversation,
    ToolChoice,
    can_switch_thinking,
)
from lowbit.runtime.serve.request.fields import (
    NEUTRAL,
    PLAIN,
    TURNS,
    AnswerBody,
    Body,
    Ignored,
    JsonObjectFormat,
    TextFormat,
    named_types,
    schema_format,
)
from lowbit.runtime.serve.request.prepare import open_conversation
from lowbit.runtime.serve.settings import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS
from lowbit.runtime.serve.sse import EventStream
from lowbit.runtime.state.sampler import SamplingParams

PARTS = ("input_text", "output_text", "text", "refusal")


class Part(Body):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Ignored[Any] = None
    logprobs: Ignored[Any] = None
    prompt_cache_breakpoint: Ignored[Any] = None


class Refusal(Body):
    """A refusal in place of an answer."""

    type: Literal["refusal"]
    refusal: str


AnyPart = Annotated[Part | Refusal, Field(discriminator="type")]
PartList = Annotated[list[AnyPart], Field(fail_fast=True, max_length=MOST_PARTS)]
Content = str | Annotated[PartList, named_types(*PARTS)]


class MessageItem(Body):
    """A turn; `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Ignored[Any] = None
    status: Ignored[Any] = None
    phase: Ignored[Any] = None


class CallItem(Body):
    """A call of an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Ignored[Any] = None
    status: Ignored[Any] = None
    namespace: Ignored[Any] = None
    caller: Ignored[Any] = None


class CallOutputItem(Body):
    """The result of a tool."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: Ignored[Any] = None
    status: Ignored[Any] = None
    caller: Ignored[Any] = None


class ReasoningText(Body):
    """Text of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MOST_PARTS)]


class ReasoningItem(Body):
    """Reasoning of an earlier turn."""

    type: Literal["reasoning"]
    summary: Ignored[ReasoningTexts | None] = None
    content: ReasoningTexts | None = None
    id: Ignored[Any] = None
    status: Ignored[Any] = None
    encrypted_content: Ignored[Any] = None


ITEMS = ("message", "function_call", "function_call_output", "reasoning")
Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


def _type_of(item: object) -> str:
    """The type of an item, which messages may leave out."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


TaggedItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
]
ItemList = Annotated[
    list[TaggedItem], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
]
Items = Annotated[ItemList, named_types(*ITEMS)]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Ignored[Any] = None
    allowed_callers: Ignored[Any] = None
    output_schema: Ignored[Any] = None


FunctionTools = Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class FunctionChoice(Body):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class NamedSchemaFormat(Body):
    """JSON under a schema."""

    type: Literal["json_schema"]
    name: Ignored[str | None] = None
    description: Ignored[str | None] = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: Ignored[bool | None] = None


class TextConfig(Body):
    """`text`."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Ignored[Any] = None


class ReasoningConfig(Body):
    """`reasoning`."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Ignored[Any] = None
    generate_summary: Ignored[Any] = None
    context: Ignored[Any] = None


class ResponsesStreamOptions(Body):
    """`stream_options`."""

    include_obfuscation: Ignored[bool | None] = None


Includes = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]


class ResponsesBody(AnswerBody):
    """The whole body; nothing is stored, so nothing of an earlier response can be named."""

    NEUTRAL = NEUTRAL | TURNS | PLAIN
    input: str | Items
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[Includes], Field(fail_fast=True, max_length=16)] | None = None
    tools: Annotated[FunctionTools, named_types("function")] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream_options: Ignored[ResponsesStreamOptions | None] = None
    truncation: Ignored[Literal["disabled"] | None] = None
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


router = APIRouter(route_class=DirectRoute)


@router.post("/v1/responses", **documented(ResponsesBody, "responses"))
async def create(request: Request) -> Response:
    """Answer a conversation."""
    opened = await open_conversation(request, ResponsesBody, conversation_of, _options)
    body, model, answers = opened.body, opened.model, opened.answers
    begun = _begun(body, opened.wanted[0].tokens.request.sampling)
    made = ResponseObject(begun, opened.prompt_tokens)
    if body.stream:
        return EventStream(answers, ResponseEvents(made, model.tokenizer))
    [one] = await collect(answers)
    output = list(output_of(one, model.tokenizer))
    return JSONResponse(made.ended(output, one.end))


ECHOED = {"tools", "tool_choice", "text"}


def _begun(body: ResponsesBody, sampling: SamplingParams) -> dict[str, Any]:
    """The response object before its answer.

    Args:
        body: body of the request.
        sampling: sampling parameters in use.
    """
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
        "tools": [tool | each for each in given.get("tools", ())],
        "tool_choice": given.get("tool_choice", "auto"),
        "truncation": "disabled",
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


def conversation_of(model: Model, body: ResponsesBody) -> Conversation:
    """The conversation of a body."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _messages_of(body.input)
    effort = None if body.reasoning is None else body.reasoning.effort
    known = effort is not None and can_switch_thinking(model)
    return Conversation(
        messages=messages,
        tools=[
            {"type": "function", "function": tool.model_dump(include=FUNCTION, exclude_none=True)}
            for tool in body.tools or ()
        ],
        choice=_choice_of(body),
        parallel=body.parallel_tool_calls is not False,
        format=_format_of(body),
        thinking=effort != "none" if known else None,
    )


FUNCTION = {"name", "description", "parameters", "strict"}


def _messages_of(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """Turns as OpenAI's chats have them; reasoning, text and calls in a row are one turn."""
    turn: dict[str, Any] = {}
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            yield from _whole(turn)
            turn = {}
            role = "system" if item.role == "developer" else item.role
            yield {"role": role, "content": _text_of(item.content)}
        elif isinstance(item, CallOutputItem):
            yield from _whole(turn)
            turn = {}
            content = _text_of(item.output)
            yield {"role": "tool", "tool_call_id": item.call_id, "content": content}
        elif isinstance(item, ReasoningItem):
            yield from _whole(turn)
            text = "".join(part.text for part in item.content or item.summary or ())
            turn = {"reasoning_content": text} if text else {}
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        else:
            if "content" in turn or "tool_calls" in turn:
                yield from _whole(turn)
                turn = {}
            turn["content"] = _text_of(item.content)
    yield from _whole(turn)


def _whole(turn: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The assistant's turn; none if it is empty."""
    if turn:
        yield {"role": "assistant", "content": "", **turn}


def _text_of(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, Part) else part.refusal for part in content)


def _choice_of(body: ResponsesBody) -> ToolChoice:
    given = body.tool_choice
    if isinstance(given, FunctionChoice):
        return ToolChoice("named", given.name)
    return ToolChoice(given or "auto")


def _format_of(body: ResponsesBody) -> AnswerFormat | None:
    given = None if body.text is None else body.text.format
    if isinstance(given, NamedSchemaFormat):
        return schema_format(given.json_schema, "text.format.schema")
    if isinstance(given, JsonObjectFormat):
        return AnswerFormat("json_object", param="text.format")
    return None


def _options(body: ResponsesBody) -> AnswerOptions:
    asked = "message.output_text.logprobs" in (body.include or ())
    if body.top_logprobs and not asked:
        raise invalid(
            "`top_logprobs` needs `message.output_text.logprobs` in `include`", "top_logprobs"
        )
    return AnswerOptions(
        sampling={
            "temperature": body.temperature,
            "top_p": body.top_p,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
        },
        max_new_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if asked else None,
    )
