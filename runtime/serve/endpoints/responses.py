"""POST /v1/responses, without anything that would have to be stored."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.answer_format import AnswerFormat, of_schema
from lowbit.runtime.serve.collected import collect
from lowbit.runtime.serve.conversation import Conversation, ToolChoice, can_switch_thinking
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.identity import new_id
from lowbit.runtime.serve.openapi import documented
from lowbit.runtime.serve.opening import open_conversation
from lowbit.runtime.serve.prepare import Wanted
from lowbit.runtime.serve.response_events import ResponseEvents
from lowbit.runtime.serve.response_object import ResponseObject, output_of
from lowbit.runtime.serve.route import DirectRoute
from lowbit.runtime.serve.schemas.formats import JsonObjectFormat
from lowbit.runtime.serve.schemas.responses import (
    CallItem,
    CallOutputItem,
    Content,
    FunctionChoice,
    Item,
    MessageItem,
    NamedSchemaFormat,
    Part,
    ReasoningItem,
    ResponsesBody,
)
from lowbit.runtime.serve.sse import EventStream

router = APIRouter(route_class=DirectRoute)


@router.post("/v1/responses", **documented(ResponsesBody, "responses"))
async def create(request: Request) -> Response:
    """Answer a conversation."""
    opened = await open_conversation(request, ResponsesBody, conversation_of, _wanted)
    body, model, answers = opened.body, opened.service.model, opened.answers
    sampling = opened.ask.tokens.request.sampling
    made = ResponseObject(new_id("resp_"), int(time.time()), body, sampling, opened.prompt_tokens)
    if body.stream:
        return EventStream(answers, ResponseEvents(made, model.tokenizer))
    [one] = await collect(answers)
    output = list(output_of(one, model.tokenizer))
    return JSONResponse(made.ended(output, one.end))


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
    """Turns as OpenAI's chats have them: reasoning, text and calls in a row are one turn."""
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
    """The assistant's turn, where there is one."""
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
        return of_schema(given.json_schema, "text.format.schema")
    if isinstance(given, JsonObjectFormat):
        return AnswerFormat("json_object", param="text.format")
    return None


def _wanted(body: ResponsesBody) -> Wanted:
    asked = "message.output_text.logprobs" in (body.include or ())
    if body.top_logprobs and not asked:
        raise invalid(
            "`top_logprobs` needs `message.output_text.logprobs` in `include`", "top_logprobs"
        )
    return Wanted(
        sampling={
            "temperature": body.temperature,
            "top_p": body.top_p,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
        },
        most=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if asked else None,
    )
