"""POST /v1/chat/completions."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.answer_format import format_of
from lowbit.runtime.serve.chat_events import ChatEvents
from lowbit.runtime.serve.collected import Collected, collect
from lowbit.runtime.serve.conversation import Conversation, ToolChoice, can_switch_thinking
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.identity import new_id
from lowbit.runtime.serve.logprobs import of_chat
from lowbit.runtime.serve.openapi import documented
from lowbit.runtime.serve.opening import open_conversation
from lowbit.runtime.serve.prepare import Wanted
from lowbit.runtime.serve.route import DirectRoute
from lowbit.runtime.serve.sampling_fields import wanted_of
from lowbit.runtime.serve.schemas.chat import ChatBody
from lowbit.runtime.serve.schemas.tools import NamedChoice
from lowbit.runtime.serve.sse import EventStream
from lowbit.runtime.serve.usage import usage_of
from lowbit.runtime.text.tokenizer import Tokenizer

router = APIRouter(route_class=DirectRoute)


@router.post("/v1/chat/completions", **documented(ChatBody, "chat"))
async def create(request: Request) -> Response:
    """Answer a conversation."""
    opened = await open_conversation(
        request, ChatBody, conversation_of, _wanted, lambda body: body.n or 1
    )
    body, model, answers = opened.body, opened.service.model, opened.answers
    head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": body.model}
    if body.stream:
        events = ChatEvents(head, body, model.tokenizer, opened.prompt_tokens)
        return EventStream(answers, events)
    found = await collect(answers)
    return JSONResponse(
        {
            **head,
            "object": "chat.completion",
            "choices": [_choice(one, i, body, model.tokenizer) for i, one in enumerate(found)],
            "usage": usage_of(opened.prompt_tokens, (one.end for one in found)).openai(),
        }
    )


def conversation_of(model: Model, body: ChatBody) -> Conversation:
    """The conversation of a body.

    Raises:
        ApiError: fields that exclude each other.
    """
    budgets = [body.thinking_budget, body.thinking_token_budget]
    return Conversation(
        messages=[each.plain() for each in body.messages],
        tools=[each.plain() for each in body.tools or ()],
        choice=_choice_of_tools(body),
        parallel=body.parallel_tool_calls is not False,
        format=format_of(body),
        thinking=_thinking(model, body),
        template_arguments=body.chat_template_kwargs or {},
        budget=next((each for each in budgets if each is not None), None),
    )


def _choice_of_tools(body: ChatBody) -> ToolChoice:
    given = body.tool_choice
    if isinstance(given, NamedChoice):
        return ToolChoice("named", given.function.name)
    return ToolChoice(given or "auto")


def _thinking(model: Model, body: ChatBody) -> bool | None:
    """The switch for thinking; None leaves it to the template, or to its arguments."""
    if body.enable_thinking is not None:
        return body.enable_thinking
    if body.reasoning_effort is None or not can_switch_thinking(model):
        return None
    if "enable_thinking" in (body.chat_template_kwargs or {}):
        return None
    return body.reasoning_effort != "none"


def _wanted(body: ChatBody) -> Wanted:
    if body.top_logprobs and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs`", "top_logprobs")
    if body.max_tokens == 0:
        raise invalid("`max_tokens` must be at least 1", "max_tokens")
    most = body.max_completion_tokens or body.max_tokens
    return wanted_of(body, most, (body.top_logprobs or 0) if body.logprobs else None)


def _choice(one: Collected, index: int, body: ChatBody, tokenizer: Tokenizer) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": one.content or (None if one.calls else ""),
        "refusal": None,
        "annotations": [],
    }
    if one.reasoning:
        message |= {"reasoning": one.reasoning, "reasoning_content": one.reasoning}
    if one.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in one.calls
        ]
    content = of_chat(tokenizer, one.tokens) if body.logprobs else None
    return {
        "index": index,
        "message": message,
        "logprobs": None if content is None else {"content": content, "refusal": None},
        "finish_reason": one.end.chat_reason,
    }
