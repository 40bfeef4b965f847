"""A conversation to be answered, the same for every API, and its prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lowbit.formats.text.length import TooLongError
from lowbit.formats.text.template import THINKING
from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.text.chat import render_marked

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


def encode(model: Model, conversation: Conversation) -> list[int]:
    """Token ids of the prompt.

    Raises:
        RequestError, ApiError: the conversation cannot be rendered, or is too long.
        CheckpointError: the template or the tokenizer is broken.
    """
    template = model.template
    if template is None:
        raise invalid("the model has no chat template; use /v1/completions", "messages")
    most = model.tokenizer.max_bytes(model.context)
    try:
        text = render_marked(
            template,
            model.control,
            conversation.messages,
            conversation.thinking,
            most,
            tools=conversation.offered or None,
            template_arguments=conversation.template_arguments,
        )
        ids = model.tokenizer.encode(text, context=model.context)
    except TooLongError as error:
        raise TooLongError(str(error), hint=f"the context is {model.context} tokens") from None
    model.tokenizer.text.check_ids(ids, model.opened.config.vocab_size)
    return ids


def can_switch_thinking(model: Model) -> bool:
    """True if the chat template knows `enable_thinking`."""
    return model.template is not None and THINKING in model.template.source
