"""Body of /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lowbit.runtime.serve.limits import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS
from lowbit.runtime.serve.schemas.common import Body, Hints, named_types
from lowbit.runtime.serve.schemas.formats import JsonObjectFormat, TextFormat
from lowbit.runtime.serve.schemas.neutral import NEUTRAL, PLAIN, TURNS

PARTS = ("input_text", "output_text", "text", "refusal")


class Part(Body):
    """Text of a message."""

    HARMLESS = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class Refusal(Body):
    """A refusal in place of an answer."""

    type: Literal["refusal"]
    refusal: str


AnyPart = Annotated[Part | Refusal, Field(discriminator="type")]
PartList = Annotated[list[AnyPart], Field(fail_fast=True, max_length=MOST_PARTS)]
Content = str | Annotated[PartList, named_types(*PARTS)]


class MessageItem(Body):
    """A turn; `type` may be left out."""

    HARMLESS = frozenset({"id", "status", "phase"})
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Any = None
    status: Any = None
    phase: Any = None


class CallItem(Body):
    """A call of an earlier turn."""

    HARMLESS = frozenset({"id", "status", "namespace", "caller"})
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Any = None
    status: Any = None
    namespace: Any = None
    caller: Any = None


class CallOutputItem(Body):
    """The result of a tool."""

    HARMLESS = frozenset({"id", "status", "caller"})
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: Any = None
    status: Any = None
    caller: Any = None


class ReasoningText(Body):
    """Text of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MOST_PARTS)]


class ReasoningItem(Body):
    """Reasoning of an earlier turn."""

    HARMLESS = frozenset({"id", "status", "encrypted_content", "summary"})
    type: Literal["reasoning"]
    summary: ReasoningTexts | None = None
    content: ReasoningTexts | None = None
    id: Any = None
    status: Any = None
    encrypted_content: Any = None


ITEMS = ("message", "function_call", "function_call_output", "reasoning")
Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


def _type_of(item: object) -> str:
    """The type of an item, which messages may leave out."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


TaggedItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
]
ItemList = Annotated[
    list[TaggedItem], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
]
Items = Annotated[ItemList, named_types(*ITEMS)]


class FunctionTool(Body):
    """A function that the model may call."""

    HARMLESS = frozenset({"defer_loading", "allowed_callers", "output_schema"})
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Any = None
    allowed_callers: Any = None
    output_schema: Any = None


FunctionTools = Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class FunctionChoice(Body):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class NamedSchemaFormat(Body):
    """JSON under a schema."""

    HARMLESS = frozenset({"name", "description", "strict"})
    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """`text`."""

    HARMLESS = frozenset({"verbosity"})
    format: (
        Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Any = None


class ReasoningConfig(Body):
    """`reasoning`."""

    HARMLESS = frozenset({"summary", "generate_summary", "context"})
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None


class ResponsesStreamOptions(Body):
    """`stream_options`."""

    HARMLESS = frozenset({"include_obfuscation"})
    include_obfuscation: bool | None = None


Includes = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]


class ResponsesBody(Hints):
    """The whole body; nothing is stored, so nothing of an earlier response can be named."""

    HARMLESS = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier", "background"),
            *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
            *("max_tool_calls", "truncation", "stream_options", "client_metadata"),
            *Hints.HARMLESS,
        }
    )
    NEUTRAL = NEUTRAL | TURNS | PLAIN
    model: str
    input: str | Items
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[Includes], Field(fail_fast=True, max_length=16)] | None = None
    tools: Annotated[FunctionTools, named_types("function")] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    user: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    client_metadata: Any = None
