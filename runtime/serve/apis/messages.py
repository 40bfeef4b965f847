"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator, Field, Tag
from starlette.requests import Request as HttpRequest

from lowbit.runtime.serve.answers import EventStream, collect
from lowbit.runtime.serve.apis.common import DirectRoute, new_id, usage_of
from lowbit.runtime.serve.apis.docs import documented
from lowbit.runtime.serve.apis.message_events import MessageEvents, content_of, ending_of
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.body import (
    NEUTRAL,
    PLAIN,
    TURNS,
    AnswerBody,
    DrawFields,
    Ignored,
    RequestBody,
    SettingsBody,
    StopList,
    TolerantBody,
)
from lowbit.runtime.serve.request.contents import Content
from lowbit.runtime.serve.request.forms import ChoiceMode, FlatSchemaFormat, schema_format
from lowbit.runtime.serve.request.images import read_images
from lowbit.runtime.serve.request.parts import (
    MediaPart,
    SkippedPart,
    TextPart,
    TextParts,
    Turned,
    by_type,
    documents_as_text,
    joined_parts,
    named_types,
    text_of,
)
from lowbit.runtime.serve.request.prepare import (
    Asked,
    can_switch_thinking,
    count_prompt,
    open_answers,
    unheard_switch,
    with_begun_answer,
)
from lowbit.runtime.serve.served_model import ServedModel
from lowbit.runtime.serve.settings import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS
from lowbit.runtime.text.last_turn import PromptEnd

CONTENT_TYPES = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
Media = Annotated[MediaPart, Tag("media")]  # those of OpenAI's APIs have one sensible reading here


class ToolUse(TolerantBody):
    """A call of an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | str


ResultPart = Annotated[
    Annotated[TextPart, Tag("text")] | Media | Annotated[SkippedPart, Tag("skipped")],
    by_type("text", default="text", media=True),
]
ResultParts = Annotated[list[ResultPart], Field(fail_fast=True, max_length=MOST_PARTS)]


class ToolResult(TolerantBody):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | ResultParts | None, BeforeValidator(documents_as_text)] = None


class Thinking(TolerantBody):
    """Reasoning of an earlier turn."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(TolerantBody):
    """Reasoning that nobody can read."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")]
    | Annotated[Thinking, Tag("thinking")]
    | Annotated[RedactedThinking, Tag("redacted_thinking")]
    | Media
    | Annotated[SkippedPart, Tag("skipped")],
    by_type(*CONTENT_TYPES, default="text", media=True),
]
Blocks = Annotated[list[Block], Field(fail_fast=True, max_length=MOST_PARTS)]
TextBlocks = Annotated[TextParts, named_types("text")]


class Turn(TolerantBody):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Blocks, BeforeValidator(documents_as_text)]


class CustomTool(TolerantBody):
    """A tool of the client's."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class Choice(SettingsBody):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(SettingsBody):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Ignored[Any] = None


class OutputConfig(SettingsBody):
    """`output_config`."""

    effort: Ignored[Any] = None
    format: FlatSchemaFormat | None = None


AnyTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[SkippedPart, Tag("skipped")],
    by_type("custom", default="custom"),
]
Tools = Annotated[list[AnyTool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class CountBody(DrawFields, RequestBody):
    """Everything that the prompt is made of; by what tokens are drawn does not matter."""

    NEUTRAL = NEUTRAL | TURNS | PLAIN
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    system: str | TextBlocks | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingConfig | None = None
    enable_thinking: bool | None = None
    output_config: OutputConfig | None = None
    output_format: FlatSchemaFormat | None = None  # its former name in the beta
    # Those of a message that change nothing of its prompt
    max_tokens: Ignored[Any] = None
    stop_sequences: Ignored[Any] = None
    stream: Ignored[Any] = None
    metadata: Ignored[Any] = None
    service_tier: Ignored[Any] = None
    cache_control: Ignored[Any] = None
    context_management: Ignored[Any] = None
    diagnostics: Ignored[Any] = None
    speed: Ignored[Any] = None
    inference_geo: Ignored[Any] = None
    user_profile_id: Ignored[Any] = None
    workspace_id: Ignored[Any] = None

    def contents(self) -> list[Content]:
        """See `ModelBody.contents`."""
        return [
            Content(turn.content, f"messages[{number}].content", shows=turn.role == "user")
            for number, turn in enumerate(self.messages)
        ]


class MessagesBody(CountBody, AnswerBody):
    """The whole body."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: StopList | None = None


router = APIRouter(route_class=DirectRoute)


@router.post("/v1/messages", **documented(MessagesBody, "messages"))
async def create(http: HttpRequest) -> Response:
    """Answer a conversation."""
    body, answers = await open_answers(http, MessagesBody, asked_of)
    prompt_tokens = answers.record.prompt_tokens
    head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": body.model}
    if body.stream:
        return EventStream(answers, MessageEvents(head, prompt_tokens))
    [one] = await collect(answers)
    return JSONResponse(
        {
            **head,
            "content": list(content_of(one)),
            **ending_of(one.end),
            "usage": usage_of(prompt_tokens, [one.end]).anthropic(),
        }
    )


@router.post("/v1/messages/count_tokens", **documented(CountBody, "messages"))
async def count_tokens(http: HttpRequest) -> Response:
    """Tokens of the prompt."""
    return JSONResponse({"input_tokens": await count_prompt(http, CountBody, asked_of)})


def asked_of(model: ServedModel, body: CountBody) -> Asked:
    """The request of a body.

    Raises:
        ApiError: `tool_choice` lacks a name, or an image cannot be read.
    """
    left_out = [*_left_out(body), *read_images(body.contents(), model.prompts)]
    left_out += unheard_switch(model, body.enable_thinking)
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": text_of(body.system)})
    for turn in body.messages:
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        else:
            messages += _messages_of(turn.role, turn.content)
    turns, end = _open_turns(body, messages)
    config = body.output_config.format if body.output_config is not None else None
    config = config or body.output_format
    thinking = body.thinking
    on = None if thinking is None or thinking.type == "adaptive" else thinking.type == "enabled"
    on = on if body.enable_thinking is None else body.enable_thinking
    choice, tool = _choice_of(body.tool_choice)
    parallel = body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use
    answer = _answer_options(body) if isinstance(body, MessagesBody) else {}
    return Asked(
        messages=turns,
        end=end,
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
            if isinstance(tool, CustomTool)
        ],
        choice=choice,
        tool=tool,
        parallel=parallel,
        format=None
        if config is None
        else schema_format(config.json_schema, "output_config.format", config.strict),
        thinking=on if can_switch_thinking(model) else None,
        budget=None if thinking is None else thinking.budget_tokens,
        left_out=left_out,
        **answer,
    )


def _open_turns(
    body: CountBody, messages: list[dict[str, Any]]
) -> tuple[Sequence[Mapping[str, Any]], PromptEnd]:
    """Messages, the last one open where it begins the answer, and where their prompt ends.

    Blank text at its end, which Anthropic's API refuses, is left out.
    """
    last = messages[-1]
    if body.messages[-1].role != "assistant" or last.get("tool_calls"):
        return messages, "next"
    return with_begun_answer([*messages[:-1], {**last, "content": last["content"].rstrip()}])


def _left_out(body: CountBody) -> list[str]:
    """Names of tools and blocks that the prompt lacks."""
    tools = [f"tool {tool.type}" for tool in body.tools or () if isinstance(tool, SkippedPart)]
    inner = [
        [*_flat(turn.content)] if isinstance(turn.content, list) else [] for turn in body.messages
    ]
    blocks = [f"{part.type}" for parts in inner for part in parts if isinstance(part, SkippedPart)]
    return [*tools, *blocks]


def _flat(blocks: Sequence[Block]) -> Iterator[Block | ResultPart]:
    for block in blocks:
        yield block
        if isinstance(block, ToolResult) and isinstance(block.content, list):
            yield from block.content


def _choice_of(given: Choice | None) -> tuple[ChoiceMode, str | None]:
    if given is None:
        return "auto", None
    if given.type == "tool":
        if given.name is None:
            raise invalid("`tool_choice.name` is missing", "tool_choice.name")
        return "named", given.name
    return "required" if given.type == "any" else given.type, None


def _messages_of(role: str, blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    """A turn as OpenAI's chats have it; results of tools become turns of their own before it."""
    said: list[str | MediaPart] = []
    reasoning, calls = "", []
    for block in blocks:
        if isinstance(block, TextPart):
            said.append(block.text)
        elif isinstance(block, MediaPart):
            said.append(block)
        elif isinstance(block, Thinking):
            reasoning += block.thinking
        elif isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": _arguments_of(block)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResult):
            content = _result_of(block)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    text = joined_parts(said)
    if role == "assistant":
        found: dict[str, Any] = {"role": role, "content": text}
        if reasoning:
            found["reasoning_content"] = reasoning
        if calls:
            found["tool_calls"] = calls
        yield found
    elif text or all(not isinstance(block, ToolResult) for block in blocks):
        yield {"role": role, "content": text}


def _arguments_of(block: ToolUse) -> str:
    return block.input if isinstance(block.input, str) else json.dumps(block.input)


def _result_of(block: ToolResult) -> Turned:
    if not isinstance(block.content, list):
        return block.content or ""
    return text_of([part for part in block.content if not isinstance(part, SkippedPart)])


def _answer_options(body: MessagesBody) -> dict[str, Any]:
    """Fields of `Asked` that a body has beside those of its prompt."""
    return {
        "sampling": body.sampling(),
        "max_new_tokens": body.max_tokens,
        "stops": tuple(body.stop_sequences or ()),
    }
