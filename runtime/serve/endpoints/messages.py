"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.answer_format import of_schema
from lowbit.runtime.serve.body import read_body
from lowbit.runtime.serve.collected import Collected, collect
from lowbit.runtime.serve.conversation import (
    Conversation,
    ToolChoice,
    can_switch_thinking,
    encode,
)
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.identity import new_id
from lowbit.runtime.serve.message_events import MessageEvents
from lowbit.runtime.serve.openapi import documented
from lowbit.runtime.serve.opening import open_conversation
from lowbit.runtime.serve.prepare import Wanted
from lowbit.runtime.serve.record import record_of
from lowbit.runtime.serve.route import DirectRoute
from lowbit.runtime.serve.schemas.common import TextPart, text_of
from lowbit.runtime.serve.schemas.messages import (
    Block,
    Choice,
    CountBody,
    MessagesBody,
    Thinking,
    ToolResult,
    ToolUse,
)
from lowbit.runtime.serve.service import service_of
from lowbit.runtime.serve.sse import EventStream
from lowbit.runtime.serve.usage import usage_of

router = APIRouter(route_class=DirectRoute)
DIRECT = {"type": "direct"}  # the model called the tool itself


@router.post("/v1/messages", **documented(MessagesBody, "messages"))
async def create(request: Request) -> Response:
    """Answer a conversation."""
    opened = await open_conversation(request, MessagesBody, conversation_of, _wanted)
    body, answers, prompt_tokens = opened.body, opened.answers, opened.prompt_tokens
    head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": body.model}
    if body.stream:
        return EventStream(answers, MessageEvents(head, prompt_tokens))
    [one] = await collect(answers)
    return JSONResponse(
        {
            **head,
            "content": list(_content(one)),
            "stop_reason": one.end.message_reason,
            "stop_sequence": one.end.stop,
            "stop_details": None,
            "container": None,
            "usage": usage_of(prompt_tokens, [one.end]).anthropic(),
        }
    )


@router.post("/v1/messages/count_tokens", **documented(CountBody, "messages"))
async def count_tokens(request: Request) -> Response:
    """Tokens of the prompt."""
    service = service_of(request)
    body = await read_body(request, CountBody, service.executor, service.crowd)
    service.check_model(body.model)
    record_of(request).ignored = body.ignored()
    model = service.model
    ids = await service.in_thread(lambda: encode(model, conversation_of(model, body)))
    return JSONResponse({"input_tokens": len(ids)})


def conversation_of(model: Model, body: CountBody) -> Conversation:
    """The conversation of a body.

    Raises:
        ApiError: a choice of tools that lacks a name.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": text_of(body.system)})
    for turn in body.messages:
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        else:
            messages += _messages_of(turn.role, turn.content)
    config = body.output_config.format if body.output_config is not None else None
    thinking = body.thinking
    on = None if thinking is None or thinking.type == "adaptive" else thinking.type == "enabled"
    choice = body.tool_choice
    return Conversation(
        messages=messages,
        tools=[
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    **({"description": tool.description} if tool.description else {}),
                    "parameters": tool.input_schema,
                    **({"strict": True} if tool.strict else {}),
                },
            }
            for tool in body.tools or ()
        ],
        choice=_choice_of(choice),
        parallel=not (choice is not None and choice.disable_parallel_tool_use),
        format=None if config is None else of_schema(config.json_schema, "output_config.format"),
        thinking=on if can_switch_thinking(model) else None,
        budget=None if thinking is None else thinking.budget_tokens,
    )


def _choice_of(given: Choice | None) -> ToolChoice:
    if given is None:
        return ToolChoice()
    if given.type == "tool":
        if given.name is None:
            raise invalid("`tool_choice.name` is missing", "tool_choice.name")
        return ToolChoice("named", given.name)
    return ToolChoice("required" if given.type == "any" else given.type)


def _messages_of(role: str, blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    """A turn as OpenAI's chats have it: results of tools are turns of their own, before it."""
    text, reasoning, calls = "", "", []
    for block in blocks:
        if isinstance(block, TextPart):
            text += block.text
        elif isinstance(block, Thinking):
            reasoning += block.thinking
        elif isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResult):
            content = text_of(block.content)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if role == "assistant":
        found: dict[str, Any] = {"role": role, "content": text}
        if reasoning:
            found["reasoning_content"] = reasoning
        if calls:
            found["tool_calls"] = calls
        yield found
    elif text or all(not isinstance(block, ToolResult) for block in blocks):
        yield {"role": role, "content": text}


def _wanted(body: MessagesBody) -> Wanted:
    sampling = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    return Wanted(sampling, body.max_tokens, tuple(body.stop_sequences or ()))


def _content(one: Collected) -> Iterator[dict[str, Any]]:
    """Blocks of an answer."""
    if one.reasoning:
        yield {"type": "thinking", "thinking": one.reasoning, "signature": ""}
    if one.content or not one.calls:
        yield {"type": "text", "text": one.content, "citations": None}
    for call in one.calls:
        yield {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": json.loads(call.arguments or "{}"),
            "caller": DIRECT,
        }
