"""POST /v1/chat/completions: OpenAI's chats."""

import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from lowbit.runtime.engine.delta import Delta
from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.answers import Collected, CollectedCall, collect
from lowbit.runtime.serve.apis.chat_body import (
    PRESERVE,
    ChatBody,
    ChatCustomTool,
    CustomChoice,
    NamedChoice,
    ThinkingSwitch,
    custom_names,
    functions_of,
    turns_of,
)
from lowbit.runtime.serve.apis.common import (
    ChunkWriter,
    DirectRoute,
    chat_logprobs,
    documented,
    joined,
    new_id,
    usage_of,
)
from lowbit.runtime.serve.apis.custom_tools import (
    custom_input,
)
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.conversation import (
    AnswerOptions,
    Conversation,
    ToolChoice,
    can_switch_thinking,
)
from lowbit.runtime.serve.request.fields import (
    answer_options,
    format_of,
)
from lowbit.runtime.serve.request.parts import SkippedPart, left_out_media
from lowbit.runtime.serve.request.prepare import Plan, open_answers, plan_of_conversation
from lowbit.runtime.serve.sse import EventStream
from lowbit.runtime.text.answer import Event, Piece, ToolCallStart
from lowbit.runtime.text.tokenizer import Tokenizer

router = APIRouter(route_class=DirectRoute)


@router.post("/v1/chat/completions", **documented(ChatBody, "chat"))
async def create(request: Request) -> Response:
    """Answer a conversation."""
    opened = await open_answers(request, ChatBody, _plan)
    body, tokenizer, answers = opened.body, opened.model.tokenizer, opened.answers
    head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": body.model}
    if body.stream:
        return EventStream(answers, ChatEvents(head, body, tokenizer, opened.prompt_tokens))
    found = await collect(answers)
    return JSONResponse(
        {
            **head,
            "object": "chat.completion",
            "choices": [_choice(one, i, body, tokenizer) for i, one in enumerate(found)],
            "usage": usage_of(opened.prompt_tokens, (one.end for one in found)).openai(),
        }
    )


def _plan(model: Model, body: ChatBody, left_out: list[str]) -> Plan:
    conversation = conversation_of(model, body)
    return plan_of_conversation(model, body, conversation, _options(body), left_out)


def conversation_of(model: Model, body: ChatBody) -> Conversation:
    """The conversation of a body.

    Raises:
        ApiError: fields that exclude each other.
    """
    budgets = [body.thinking_budget, body.thinking_token_budget]
    if isinstance(body.thinking, ThinkingSwitch):
        budgets.append(body.thinking.budget_tokens)
    if body.reasoning is not None:
        budgets.append(body.reasoning.max_tokens)
    return Conversation(
        messages=turns_of(body.messages),
        tools=functions_of(body.tools),
        choice=_choice_of_tools(body),
        parallel=body.parallel_tool_calls is not False,
        format=format_of(body),
        thinking=_thinking(model, body),
        template_arguments=_arguments(model, body),
        budget=next((each for each in budgets if each is not None), None),
        left_out=_left_out(model, body),
    )


def _left_out(model: Model, body: ChatBody) -> list[str]:
    """Names of tools and images that the prompt lacks; errors as in `left_out_media`."""
    tools = [f"tool {tool.type}" for tool in body.tools or () if isinstance(tool, SkippedPart)]
    tools += [
        f"grammar of {tool.custom.name}"
        for tool in body.tools or ()
        if isinstance(tool, ChatCustomTool) and tool.grammar is not None
    ]
    if body.preserve_thinking is not None and not _knows_preserve(model):
        tools.append(PRESERVE)
    return tools + left_out_media([each.content for each in body.messages], "messages")


def _arguments(model: Model, body: ChatBody) -> dict[str, Any]:
    """Arguments of the chat template; `preserve_thinking` is one where the template knows it."""
    given = dict(body.chat_template_kwargs or {})
    if body.preserve_thinking is not None and _knows_preserve(model):
        given.setdefault(PRESERVE, body.preserve_thinking)
    return given


def _knows_preserve(model: Model) -> bool:
    return model.template is not None and PRESERVE in model.template.source


def _choice_of_tools(body: ChatBody) -> ToolChoice:
    given = body.tool_choice
    if isinstance(given, NamedChoice):
        return ToolChoice("named", given.function.name)
    if isinstance(given, CustomChoice):
        return ToolChoice("named", given.custom.name)
    return ToolChoice(given or "auto")


def _thinking(model: Model, body: ChatBody) -> bool | None:
    """`enable_thinking` of the template; None leaves it to the template or to its arguments."""
    if body.enable_thinking is not None:
        return body.enable_thinking
    if not can_switch_thinking(model) or "enable_thinking" in (body.chat_template_kwargs or {}):
        return None
    return next((switch for switch in _switches(body) if switch is not None), None)


def _switches(body: ChatBody) -> Iterator[bool | None]:
    """Thinking on or off, as each of the other fields asks."""
    yield None if body.reasoning_effort is None else body.reasoning_effort != "none"
    thinking, reasoning = body.thinking, body.reasoning
    if isinstance(thinking, ThinkingSwitch):
        yield {"enabled": True, "disabled": False}.get(thinking.type)
    else:
        yield thinking
    if reasoning is not None:
        yield reasoning.enabled
        yield None if reasoning.effort is None else reasoning.effort != "none"


def _shows_reasoning(body: ChatBody) -> bool:
    """False if the answer shall leave its reasoning out."""
    return body.include_reasoning is not False and not (body.reasoning and body.reasoning.exclude)


def _options(body: ChatBody) -> AnswerOptions:
    if body.top_logprobs and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs`", "top_logprobs")
    if body.max_tokens == 0:
        raise invalid("`max_tokens` must be at least 1", "max_tokens")
    most = body.max_completion_tokens or body.max_tokens
    return answer_options(body, most, (body.top_logprobs or 0) if body.logprobs else None)


def _choice(one: Collected, index: int, body: ChatBody, tokenizer: Tokenizer) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": one.content or (None if one.calls else ""),
        "refusal": None,
        "annotations": [],
    }
    if one.reasoning and _shows_reasoning(body):
        message |= {"reasoning": one.reasoning, "reasoning_content": one.reasoning}
    if one.calls:
        names = custom_names(body)
        message["tool_calls"] = [_call(call, call.name in names) for call in one.calls]
    content = chat_logprobs(tokenizer, one.tokens) if body.logprobs else None
    return {
        "index": index,
        "message": message,
        "logprobs": None if content is None else {"content": content, "refusal": None},
        "finish_reason": one.end.chat_reason,
    }


def _call(call: CollectedCall, custom: bool) -> dict[str, Any]:
    if custom:
        found = {"name": call.name, "input": custom_input(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": found}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class ChatEvents(ChunkWriter):
    """Writes the chunks of a streamed chat."""

    def __init__(
        self, head: dict[str, Any], body: ChatBody, tokenizer: Tokenizer, prompt_tokens: int
    ) -> None:
        """Prepare the parts that all chunks share; arguments as in `ChunkWriter`."""
        super().__init__({**head, "object": "chat.completion.chunk"}, body, prompt_tokens)
        self._tokenizer, self._choices = tokenizer, body.count
        self._logprobs = bool(body.logprobs)
        self._reasoning = _shows_reasoning(body)
        self.custom_names = custom_names(body)
        self._custom: dict[tuple[int, int], str] = {}  # arguments, by answer and call

    def open(self) -> bytes:
        """A chunk with the role for every choice."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(index, delta) for index in range(self._choices))

    def update(self, delta: Delta) -> bytes:
        """Chunks with text, with reasoning apart from content, and with calls."""
        data = b""
        tokens = chat_logprobs(self._tokenizer, delta.tokens) if self._logprobs else []
        for found in joined(delta.events):
            if isinstance(found, Piece) and found.reasoning and not self._reasoning:
                continue
            content = self._content(delta.index, found)
            if content is None:
                continue
            if "content" in content and tokens:
                data += self._chunk(delta.index, content, logprobs=tokens)
                tokens = []
            else:
                data += self._chunk(delta.index, content)
        if tokens:  # their text is held back
            data += self._chunk(delta.index, {"content": ""}, logprobs=tokens)
        if delta.end is not None:
            self.count(delta.end)
            for (answer, call), arguments in self._custom.items():  # known at the end of a call
                if answer == delta.index:
                    custom = {"index": call, "custom": {"input": custom_input(arguments)}}
                    data += self._chunk(answer, {"tool_calls": [custom]})
            data += self._chunk(delta.index, {}, delta.end.chat_reason)
        return data

    def _content(self, index: int, found: Event) -> dict[str, Any] | None:
        """The delta of an event of an answer; None for arguments of a custom tool."""
        if isinstance(found, Piece):
            if found.reasoning:
                return {"reasoning": found.text, "reasoning_content": found.text}
            return {"content": found.text}
        if isinstance(found, ToolCallStart):
            custom = found.name in self.custom_names
            if custom:
                self._custom[index, found.index] = ""
            call = _call(CollectedCall(found.id, found.name), custom)
            return {"tool_calls": [{"index": found.index, **call}]}
        if (index, found.index) in self._custom:
            self._custom[index, found.index] += found.fragment
            return None
        call = {"index": found.index, "function": {"arguments": found.fragment}}
        return {"tool_calls": [call]}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> bytes:
        return self.chunk(
            {
                "index": index,
                "delta": delta,
                "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
                "finish_reason": finish,
            }
        )
