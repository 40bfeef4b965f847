"""Bodies of /v1/chat/completions, and what of them a chat template takes."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag

from lowbit.runtime.serve.apis.custom_tools import CustomFormat, custom_arguments, custom_function
from lowbit.runtime.serve.request.fields import (
    NEUTRAL,
    TURNS,
    Body,
    FormatFields,
    Ignored,
    SamplingBody,
    TolerantBody,
)
from lowbit.runtime.serve.request.parts import SkippedPart, Text, by_type, text_of
from lowbit.runtime.serve.settings import MOST_CALLS, MOST_MESSAGES, MOST_TOOLS


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


class CustomGrammar(TolerantBody):
    """`tools[].custom.format`."""

    grammar: CustomFormat | None = None


class CustomDefinition(TolerantBody):
    """`tools[].custom`."""

    name: str
    description: str | None = None
    format: CustomGrammar | None = None


class ChatCustomTool(TolerantBody):
    """One of `tools` whose input is one text."""

    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def grammar(self) -> CustomFormat | None:
        """Grammar of the input."""
        return None if self.custom.format is None else self.custom.format.grammar


AnyTool = Annotated[
    Annotated[ChatTool, Tag("function")]
    | Annotated[ChatCustomTool, Tag("custom")]
    | Annotated[SkippedPart, Tag("skipped")],
    by_type("function", "custom", default="function"),
]
ChatTools = Annotated[list[AnyTool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class FunctionName(Body):
    """The function of a named choice."""

    name: str


class NamedChoice(Body):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


class CustomChoice(Body):
    """`tool_choice` that names a custom tool."""

    type: Literal["custom"]
    custom: FunctionName


Choice = Annotated[NamedChoice | CustomChoice, Field(discriminator="type")]


class CalledFunction(TolerantBody):
    """`tool_calls[].function` of an earlier turn."""

    name: str
    arguments: str


class ToolCall(TolerantBody):
    """A call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustom(TolerantBody):
    """`tool_calls[].custom` of an earlier turn."""

    name: str
    input: str


class CustomCall(TolerantBody):
    """A call of a custom tool of an earlier turn."""

    id: str | None = None
    type: Literal["custom"]
    custom: CalledCustom


AnyCall = Annotated[
    Annotated[ToolCall, Tag("function")] | Annotated[CustomCall, Tag("custom")],
    by_type("function", "custom", default="function"),
]
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


Calls = Annotated[list[AnyCall], Field(fail_fast=True, max_length=MOST_CALLS)]


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
    tool_choice: Literal["auto", "none", "required"] | Choice | None = None
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
    for call in turn.get("tool_calls", ()):
        if custom := call.pop("custom", None):
            function = {"name": custom["name"], "arguments": custom_arguments(custom["input"])}
            call |= {"type": "function", "function": function}
    return turn


def functions_of(
    tools: Sequence[ChatTool | ChatCustomTool | SkippedPart] | None,
) -> list[dict[str, Any]]:
    """The tools as functions; those that cannot be run are left out."""
    found = []
    for tool in tools or ():
        if isinstance(tool, ChatTool):
            found.append(tool.plain())
        elif isinstance(tool, ChatCustomTool):
            custom = custom_function(tool.custom.name, tool.custom.description, tool.grammar)
            found.append({"type": "function", "function": custom})
    return found


def custom_names(body: ChatBody) -> frozenset[str]:
    """Names of the custom tools."""
    tools = body.tools or ()
    return frozenset(tool.custom.name for tool in tools if isinstance(tool, ChatCustomTool))
