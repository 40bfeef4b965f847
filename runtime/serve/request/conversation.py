"""A conversation to be answered, the same for every API, and its prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lowbit.formats.text.length import TooLongError
from lowbit.formats.text.template import THINKING
from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.text.answer import Begin
from lowbit.runtime.text.chat import begin_of
from lowbit.runtime.text.tools import CallForm, Tool, form_of, read_tools

ChoiceMode = Literal["auto", "none", "required", "named"]
FormatKind = Literal["json_object", "json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format that the content of an answer must have.

    Attributes:
        kind: kind of format.
        schema: JSON schema, for `json_schema`.
        text: expression or grammar, for `regex` and `lark`.
        param: field of the request that asks for it.
    """

    kind: FormatKind
    schema: Any = None
    text: str = ""
    param: str = "response_format"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Calls that an answer may or must have.

    Attributes:
        mode: `auto` leaves it to the model, `none` forbids calls, `required` asks for at least
            one, `named` for a certain one.
        name: tool to call, for `named`.
    """

    mode: ChoiceMode = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and everything that shapes the answer except sampling.

    Attributes:
        messages: messages as OpenAI's chats have them.
        tools: tools as OpenAI's chats have them.
        choice: calls that the answer may or must have.
        parallel: an answer may have several calls.
        format: format of the answer's content.
        thinking: `enable_thinking` of the chat template; None leaves it to the template.
        template_arguments: other arguments of the chat template.
        budget: most tokens of reasoning; None for the server's own limit.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    format: AnswerFormat | None = None
    thinking: bool | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    budget: int | None = None

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """Tools that the prompt tells the model of."""
        return () if self.choice.mode == "none" else self.tools

    @property
    def limited(self) -> bool:
        """True if a grammar limits the answer: its content or its calls."""
        if self.format is not None:
            return True
        strict = any(tool.get("function", tool).get("strict") for tool in self.offered)
        return self.choice.mode in ("required", "named") or strict


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a conversation.

    Attributes:
        ids: token ids.
        begin: beginning of the output, see `Begin`.
        tools: tools that the prompt tells the model of.
        form: form of their calls; None without tools, and where the template teaches none.
    """

    ids: list[int]
    begin: Begin
    tools: tuple[Tool, ...]
    form: CallForm | None


def encode(model: Model, conversation: Conversation) -> Prompt:
    """Encode the prompt of a conversation.

    Raises:
        RequestError, ApiError: the conversation cannot be rendered, or is too long.
        CheckpointError: the template or the tokenizer is broken.
    """
    if model.template is None:
        raise invalid("the model has no chat template; use /v1/completions", "messages")
    tools = read_tools(conversation.offered)
    try:
        ids = model.encode(
            conversation.messages,
            thinking=conversation.thinking,
            tools=tools,
            template_arguments=conversation.template_arguments,
        )
    except TooLongError as error:
        raise TooLongError(str(error), hint=f"the context is {model.context} tokens") from None
    form = form_of(model.template) if tools else None
    return Prompt(ids, begin_of(ids, model.tokenizer), tools, form)


def can_switch_thinking(model: Model) -> bool:
    """True if the chat template knows `enable_thinking`."""
    return model.template is not None and THINKING in model.template.source
