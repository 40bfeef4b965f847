"""POST /v1/chat/completions: OpenAI's chats."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HttpRequest

from lowbit.runtime.engine.delta import Delta
from lowbit.runtime.serve.answers import Collected, CollectedCall, EventStream, collect, joined
from lowbit.runtime.serve.apis.chat_messages import (
    Message,
    Messages,
    contents_of,
    turns_of,
)
from lowbit.runtime.serve.apis.common import (
    ChunkWriter,
    DirectRoute,
    chat_logprobs,
    new_id,
    usage_of,
)
from lowbit.runtime.serve.apis.docs import documented
from lowbit.runtime.serve.apis.functions import (
    FunctionFields,
    asked_functions,
    finish_reason,
    function_delta,
)
from lowbit.runtime.serve.apis.tools import (
    ChatChoice,
    ChatCustomTool,
    ChatTools,
    FunctionName,
    chat_choice_of,
    custom_input,
)
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.body import (
    NEUTRAL,
    TURNS,
    Ignored,
    SamplingBody,
    sampling_options,
)
from lowbit.runtime.serve.request.contents import Content
from lowbit.runtime.serve.request.forms import FormatFields, format_of
from lowbit.runtime.serve.request.images import read_images
from lowbit.runtime.serve.request.parts import SkippedPart
from lowbit.runtime.serve.request.prepare import (
    Asked,
    can_switch_thinking,
    effort_switch,
    open_answers,
    unheard_switch,
    with_begun_answer,
)
from lowbit.runtime.serve.served_model import ServedModel
from lowbit.runtime.text.answer import Event, Piece, ToolCallStart
from lowbit.runtime.text.chat import knows_argument
from lowbit.runtime.text.last_turn import PromptEnd
from lowbit.runtime.text.tokenizer import Tokenizer

Tokens = Annotated[int, Field(ge=0)]
PRESERVE = "preserve_thinking"
TYPES = {"enabled": True, "disabled": False}  # of `thinking`


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


class PromptFields(FunctionFields):
    """Fields of which a prompt is made, beside the messages."""

    tools: ChatTools | None = None
    tool_choice: Literal["auto", "none", "required"] | ChatChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None  # see `effort_switch`
    thinking: ThinkingSwitch | bool | None = None
    reasoning: ReasoningSwitch | None = None
    preserve_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatBody(PromptFields, SamplingBody, FormatFields):
    """The whole body."""

    NEUTRAL = NEUTRAL | TURNS | {"max_tokens": (-1,)}
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    parallel_tool_calls: bool | None = None
    thinking_budget: Tokens | None = None
    thinking_token_budget: Tokens | None = None
    include_reasoning: bool | None = None
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

    def contents(self) -> list[Content]:
        """See `ModelBody.contents`."""
        return contents_of(self.messages)


def custom_names(body: ChatBody) -> frozenset[str]:
    """Names of the custom tools."""
    tools = body.tools or ()
    return frozenset(tool.custom.name for tool in tools if isinstance(tool, ChatCustomTool))


router = APIRouter(route_class=DirectRoute)


@router.post("/v1/chat/completions", **documented(ChatBody, "chat"))
async def create(http: HttpRequest) -> Response:
    """Answer a conversation."""
    body, answers = await open_answers(http, ChatBody, asked_of)
    tokenizer, prompt_tokens = answers.tokenizer, answers.record.prompt_tokens
    head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": body.model}
    if body.stream:
        return EventStream(answers, ChatEvents(head, body, tokenizer, prompt_tokens))
    found = await collect(answers)
    return JSONResponse(
        {
            **head,
            "object": "chat.completion",
            "choices": [_choice(one, i, body, tokenizer) for i, one in enumerate(found)],
            "usage": usage_of(prompt_tokens, (one.end for one in found)).openai(),
        }
    )


def asked_of(model: ServedModel, body: ChatBody) -> Asked:
    """The request of a body.

    Raises:
        ApiError: fields that exclude each other.
    """
    if body.top_logprobs and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs`", "top_logprobs")
    if body.max_tokens == 0:
        raise invalid("`max_tokens` must be at least 1", "max_tokens")
    budgets = [body.thinking_budget, body.thinking_token_budget]
    if isinstance(body.thinking, ThinkingSwitch):
        budgets.append(body.thinking.budget_tokens)
    if body.reasoning is not None:
        budgets.append(body.reasoning.max_tokens)
    most, form = body.max_completion_tokens or body.max_tokens, format_of(body)
    named = isinstance(body.function_call, FunctionName)
    if named and form is not None and not form.goes_with_tools:
        raise invalid(f"`function_call` excludes `{form.param}`", "function_call")
    return replace(
        prompt_of(model, body, body.messages),
        parallel=body.parallel_tool_calls is not False and not body.functions,
        format=form,
        budget=next((each for each in budgets if each is not None), None),
        **sampling_options(body, most, (body.top_logprobs or 0) if body.logprobs else None),
    )


def prompt_of(model: ServedModel, fields: PromptFields, messages: Sequence[Message]) -> Asked:
    """The prompt that a chat asks for.

    Raises:
        ApiError: an image cannot be read, or fields exclude each other.
    """
    functions, given = asked_functions(fields.tools, fields.tool_choice, fields)
    choice, tool, functions, missing = chat_choice_of(given, functions)
    left_out = [*missing, *_left_out(model, fields)]
    left_out += read_images(contents_of(messages), model.prompts)
    turns, end = _ending(fields, turns_of(messages))
    return Asked(
        messages=turns,
        end=end,
        tools=functions,
        choice=choice,
        tool=tool,
        thinking=_thinking(model, fields),
        template_arguments=_arguments(model, fields),
        left_out=left_out,
    )


def _ending(
    fields: PromptFields, turns: list[dict[str, Any]]
) -> tuple[Sequence[Mapping[str, Any]], PromptEnd]:
    """Turns of the prompt, and where it ends."""
    if not fields.continue_final_message:
        return turns, "none" if fields.add_generation_prompt is False else "next"
    where = "continue_final_message"
    if fields.add_generation_prompt:
        raise invalid(f"`{where}` and `add_generation_prompt` exclude each other", where)
    if turns[-1]["role"] != "assistant":
        return turns, "last"
    if turns[-1].get("tool_calls"):
        raise invalid(f"`{where}` continues text, and the last message has calls", where)
    return with_begun_answer(turns)


def _left_out(model: ServedModel, body: PromptFields) -> list[str]:
    """Names of tools that the prompt lacks."""
    tools = [f"tool {tool.type}" for tool in body.tools or () if isinstance(tool, SkippedPart)]
    tools += [
        f"grammar of {tool.custom.name}"
        for tool in body.tools or ()
        if isinstance(tool, ChatCustomTool) and tool.grammar is not None
    ]
    unknown = [name for name in body.chat_template_kwargs or () if not _knows(model, name)]
    if body.preserve_thinking is not None and not _knows(model, PRESERVE):
        unknown.append(PRESERVE)
    return [*tools, *unknown, *unheard_switch(model, body.enable_thinking)]


def _arguments(model: ServedModel, body: PromptFields) -> dict[str, Any]:
    """Arguments of the chat template that it knows; `preserve_thinking` may be one."""
    given = {PRESERVE: body.preserve_thinking} if body.preserve_thinking is not None else {}
    given |= body.chat_template_kwargs or {}
    return {name: value for name, value in given.items() if _knows(model, name)}


def _knows(model: ServedModel, argument: str) -> bool:
    return model.template is None or knows_argument(model.template, argument)


def _thinking(model: ServedModel, body: PromptFields) -> bool | None:
    """`enable_thinking` of the template; None leaves it to the template or to its arguments."""
    if not can_switch_thinking(model):
        return None
    if body.enable_thinking is not None:
        return body.enable_thinking
    if "enable_thinking" in (body.chat_template_kwargs or {}):
        return None
    return next((switch for switch in _switches(body) if switch is not None), None)


def _switches(body: PromptFields) -> Iterator[bool | None]:
    """Thinking on or off, as each of the other fields asks."""
    yield effort_switch(body.reasoning_effort)
    thinking, reasoning = body.thinking, body.reasoning
    yield TYPES.get(thinking.type) if isinstance(thinking, ThinkingSwitch) else thinking
    if reasoning is not None:
        yield reasoning.enabled
        yield effort_switch(reasoning.effort)


def _shows_reasoning(body: ChatBody) -> bool:
    """False if the answer shall leave its reasoning out."""
    return body.include_reasoning is not False and not (body.reasoning and body.reasoning.exclude)


def _choice(one: Collected, index: int, body: ChatBody, tokenizer: Tokenizer) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": one.content or (None if one.calls else ""),
        "refusal": None,
        "annotations": [],
    }
    if one.reasoning and _shows_reasoning(body):
        message |= {"reasoning": one.reasoning, "reasoning_content": one.reasoning}
    if one.calls and body.functions:
        call = one.calls[0]
        message["function_call"] = {"name": call.name, "arguments": call.arguments}
    elif one.calls:
        names = custom_names(body)
        message["tool_calls"] = [_call(call, call.name in names) for call in one.calls]
    content = chat_logprobs(tokenizer, one.tokens) if body.logprobs else None
    return {
        "index": index,
        "message": message,
        "logprobs": None if content is None else {"content": content, "refusal": None},
        "finish_reason": finish_reason(body, one.end),
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
        self._body, self._reasoning = body, _shows_reasoning(body)
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
            data += self._chunk(delta.index, {}, finish_reason(self._body, delta.end))
        return data

    def _content(self, index: int, found: Event) -> dict[str, Any] | None:
        """The delta of an event of an answer; None for arguments of a custom tool."""
        if isinstance(found, Piece):
            if found.reasoning:
                return {"reasoning": found.text, "reasoning_content": found.text}
            return {"content": found.text}
        if self._body.functions:
            return function_delta(found)
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
