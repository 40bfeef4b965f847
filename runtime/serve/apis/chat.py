"""POST /v1/chat/completions: OpenAI's chats."""

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, Tag

from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.answers import Collected, collect
from lowbit.runtime.serve.apis.common import (
    ChunkWriter,
    DirectRoute,
    chat_logprobs,
    documented,
    joined,
    new_id,
    usage_of,
)
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.job import Update
from lowbit.runtime.serve.request.conversation import (
    AnswerOptions,
    Conversation,
    ToolChoice,
    can_switch_thinking,
)
from lowbit.runtime.serve.request.fields import (
    NEUTRAL,
    TURNS,
    Body,
    FormatFields,
    Ignored,
    SamplingBody,
    TolerantBody,
    answer_options,
    format_of,
)
from lowbit.runtime.serve.request.parts import SkippedPart, Text, by_type, left_out_media, text_of
from lowbit.runtime.serve.request.prepare import open_conversation
from lowbit.runtime.serve.settings import MOST_CALLS, MOST_MESSAGES, MOST_TOOLS
from lowbit.runtime.serve.sse import EventStream
from lowbit.runtime.text.answer import Event, Piece, ToolCallStart
from lowbit.runtime.text.tokenizer import Tokenizer


class Function(TolerantBody):
    """`tools[].function`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(TolerantBody):
    """One of `tools`."""

    type: Literal["function"]
    function: Function


AnyTool = Annotated[
    Annotated[ChatTool, Tag("function")] | Annotated[SkippedPart, Tag("skipped")],
    by_type("function", default="function"),
]
ChatTools = Annotated[list[AnyTool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class FunctionName(Body):
    """The function of a named choice."""

    name: str


class NamedChoice(Body):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(TolerantBody):
    """`tool_calls[].function` of an earlier turn."""

    name: str
    arguments: str


class ToolCall(TolerantBody):
    """A call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


Tokens = Annotated[int, Field(ge=0)]


class SystemMessage(TolerantBody):
    """Instructions."""

    role: Literal["system", "developer"]
    content: Text
    name: str | None = None


class UserMessage(TolerantBody):
    """A turn of the user."""

    role: Literal["user"]
    content: Text
    name: str | None = None


Calls = Annotated[list[ToolCall], Field(fail_fast=True, max_length=MOST_CALLS)]


class ThinkingBlock(BaseModel):
    """Reasoning as Anthropic's API has it, which LiteLLM sends in chats."""

    model_config = ConfigDict(extra="ignore", strict=True)
    thinking: str = ""


ThinkingBlocks = Annotated[list[ThinkingBlock], Field(fail_fast=True, max_length=MOST_CALLS)]


class AssistantMessage(TolerantBody):
    """A turn of the model, as responses hold it."""

    role: Literal["assistant"]
    content: Text | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    thinking_blocks: ThinkingBlocks | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Calls | None = None


class ToolMessage(TolerantBody):
    """The result of a tool."""

    role: Literal["tool"]
    content: Text
    tool_call_id: str | None = None
    name: str | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]

Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]


PRESERVE = "preserve_thinking"


class ThinkingSwitch(BaseModel):
    """`thinking`, as Anthropic's API and others have it."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: str
    budget_tokens: Tokens | None = None


class ReasoningSwitch(BaseModel):
    """`reasoning`, as OpenRouter and OpenAI's responses have it."""

    model_config = ConfigDict(extra="ignore", strict=True)
    effort: str | None = None
    enabled: bool | None = None
    max_tokens: Tokens | None = None
    exclude: bool | None = None


class ChatBody(SamplingBody, FormatFields):
    """The whole body."""

    NEUTRAL = NEUTRAL | TURNS | {"max_tokens": (-1,)}
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: ChatTools | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_budget: Tokens | None = None
    thinking_token_budget: Tokens | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool | None = None
    thinking: ThinkingSwitch | bool | None = None
    reasoning: ReasoningSwitch | None = None
    preserve_thinking: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=8)] | None = None
    metadata: Ignored[Any] = None
    store: Ignored[Any] = None
    service_tier: Ignored[Any] = None
    safety_identifier: Ignored[Any] = None
    prompt_cache_key: Ignored[Any] = None
    prompt_cache_retention: Ignored[Any] = None
    prompt_cache_options: Ignored[Any] = None
    prediction: Ignored[Any] = None
    cache_salt: Ignored[Any] = None
    verbosity: Ignored[Literal["low", "medium", "high"] | None] = None


router = APIRouter(route_class=DirectRoute)


@router.post("/v1/chat/completions", **documented(ChatBody, "chat"))
async def create(request: Request) -> Response:
    """Answer a conversation."""
    opened = await open_conversation(request, ChatBody, conversation_of, _options)
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


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them."""
    return [_turn_of(each) for each in messages]


def _turn_of(message: Message) -> dict[str, Any]:
    turn = message.plain()
    if isinstance(message.content, list):
        turn["content"] = text_of(message.content)
    if turn.pop("thinking_blocks", None) and isinstance(message, AssistantMessage):
        thought = "".join(block.thinking for block in message.thinking_blocks or ())
        if thought and not (message.reasoning_content or message.reasoning):
            turn["reasoning_content"] = thought
    return turn


def functions_of(tools: Sequence[ChatTool | SkippedPart] | None) -> list[dict[str, Any]]:
    """The tools that are functions; others are left out."""
    return [tool.plain() for tool in tools or () if isinstance(tool, ChatTool)]


def _left_out(model: Model, body: ChatBody) -> list[str]:
    """Names of tools and images that the prompt lacks; errors as in `left_out_media`."""
    tools = [f"tool {tool.type}" for tool in body.tools or () if isinstance(tool, SkippedPart)]
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
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in one.calls
        ]
    content = chat_logprobs(tokenizer, one.tokens) if body.logprobs else None
    return {
        "index": index,
        "message": message,
        "logprobs": None if content is None else {"content": content, "refusal": None},
        "finish_reason": one.end.chat_reason,
    }


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

    def open(self) -> bytes:
        """A chunk with the role for every choice."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(index, delta) for index in range(self._choices))

    def update(self, update: Update) -> bytes:
        """Chunks with text, with reasoning apart from content, and with calls."""
        data = b""
        tokens = chat_logprobs(self._tokenizer, update.tokens) if self._logprobs else []
        for found in joined(update.events):
            if isinstance(found, Piece) and found.reasoning and not self._reasoning:
                continue
            delta = _delta(found)
            if "content" in delta and tokens:
                data += self._chunk(update.index, delta, logprobs=tokens)
                tokens = []
            else:
                data += self._chunk(update.index, delta)
        if tokens:  # their text is held back
            data += self._chunk(update.index, {"content": ""}, logprobs=tokens)
        if update.end is not None:
            self.count(update.end)
            data += self._chunk(update.index, {}, update.end.chat_reason)
        return data

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


def _delta(found: Event) -> dict[str, Any]:
    if isinstance(found, Piece):
        if found.reasoning:
            return {"reasoning": found.text, "reasoning_content": found.text}
        return {"content": found.text}
    call: dict[str, Any] = {"index": found.index}
    if isinstance(found, ToolCallStart):
        function = {"name": found.name, "arguments": ""}
        call |= {"id": found.id, "type": "function", "function": function}
    else:
        call["function"] = {"arguments": found.fragment}
    return {"tool_calls": [call]}
