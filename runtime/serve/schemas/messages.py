"""Bodies of /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lowbit.runtime.serve.limits import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS
from lowbit.runtime.serve.schemas.common import (
    Body,
    Hints,
    StopList,
    TextPart,
    TextParts,
    named_types,
)
from lowbit.runtime.serve.schemas.neutral import NEUTRAL, PLAIN, TURNS

CONTENT_TYPES = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


class ToolUse(Body):
    """A call of an earlier turn."""

    HARMLESS = frozenset({"cache_control", "caller"})
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResult(Body):
    """The result of a tool."""

    HARMLESS = frozenset({"cache_control", "is_error"})
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[TextParts, named_types("text")] | None = None
    is_error: bool | None = None
    cache_control: Any = None


class Thinking(Body):
    """Reasoning of an earlier turn."""

    HARMLESS = frozenset({"signature"})
    type: Literal["thinking"]
    thinking: str
    signature: Any = None


class RedactedThinking(Body):
    """Reasoning that nobody can read."""

    HARMLESS = frozenset({"data"})
    type: Literal["redacted_thinking"]
    data: Any = None


Block = Annotated[
    TextPart | ToolUse | ToolResult | Thinking | RedactedThinking, Field(discriminator="type")
]
BlockList = Annotated[list[Block], Field(fail_fast=True, max_length=MOST_PARTS)]
Blocks = Annotated[BlockList, named_types(*CONTENT_TYPES)]
TextBlocks = Annotated[TextParts, named_types("text")]


class Turn(Body):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class CustomTool(Body):
    """A tool of the client's."""

    HARMLESS = frozenset(
        {"cache_control", "defer_loading", "allowed_callers", "input_examples"}
    ) | {"eager_input_streaming"}
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: Any = None
    strict: bool | None = None
    defer_loading: Any = None
    allowed_callers: Any = None
    input_examples: Any = None
    eager_input_streaming: Any = None


class Choice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """`thinking`."""

    HARMLESS = frozenset({"display"})
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Any = None


class SchemaFormat(Body):
    """`output_config.format`."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """`output_config`."""

    HARMLESS = frozenset({"effort"})
    effort: Any = None
    format: SchemaFormat | None = None


def _custom_only(value: object) -> object:
    """Name the type of a tool that runs on Anthropic's servers."""
    for tool in value[:MOST_TOOLS] if isinstance(value, list) else []:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise ValueError(f"tools of type `{kind[:40]}` are not supported, only `custom`")
    return value


ToolList = Annotated[list[CustomTool], Field(fail_fast=True, max_length=MOST_TOOLS)]
Tools = Annotated[ToolList, BeforeValidator(_custom_only)]


class CountBody(Hints):
    """Everything that the prompt is made of."""

    HARMLESS = frozenset(
        {
            *("cache_control", "context_management", "diagnostics", "speed", "inference_geo"),
            *("user_profile_id", "workspace_id"),
            *Hints.HARMLESS,
        }
    )
    NEUTRAL = NEUTRAL | TURNS | PLAIN | {"mcp_servers": ([],)}
    model: str
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    system: str | TextBlocks | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    speed: Any = None
    inference_geo: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class MessagesBody(CountBody):
    """The whole body."""

    HARMLESS = CountBody.HARMLESS | {"metadata", "service_tier"}
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: StopList | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Any = None
    service_tier: Any = None
