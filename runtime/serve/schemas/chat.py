"""Body of /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field

from lowbit.runtime.serve.limits import MOST_CALLS, MOST_MESSAGES
from lowbit.runtime.serve.schemas.common import Body, Hints, SamplingBody, Text
from lowbit.runtime.serve.schemas.formats import FormatFields
from lowbit.runtime.serve.schemas.neutral import NEUTRAL, TURNS
from lowbit.runtime.serve.schemas.tools import ChatTools, NamedChoice, ToolCall

Tokens = Annotated[int, Field(ge=0)]


class SystemMessage(Body):
    """Instructions."""

    role: Literal["system", "developer"]
    content: Text
    name: str | None = None


class UserMessage(Body):
    """A turn of the user."""

    role: Literal["user"]
    content: Text
    name: str | None = None


Calls = Annotated[list[ToolCall], Field(fail_fast=True, max_length=MOST_CALLS)]


class AssistantMessage(Body):
    """A turn of the model, as responses hold it."""

    HARMLESS = frozenset({"refusal", "annotations", "provider_specific_fields", "audio"})
    role: Literal["assistant"]
    content: Text | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Calls | None = None
    annotations: Any = None
    provider_specific_fields: Any = None


class ToolMessage(Body):
    """The result of a tool."""

    role: Literal["tool"]
    content: Text
    tool_call_id: str | None = None
    name: str | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]

Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]


class ChatBody(SamplingBody, FormatFields):
    """The whole body."""

    HARMLESS = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier"),
            *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
            *("prediction", "cache_salt", "verbosity"),
            *Hints.HARMLESS,
        }
    )
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
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=8)] | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    prediction: Any = None
    cache_salt: Any = None
    verbosity: Literal["low", "medium", "high"] | None = None
