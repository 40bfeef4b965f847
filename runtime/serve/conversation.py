"""A conversation to be answered, whichever API it came through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lowbit.formats.text.length import TooLongError
from lowbit.formats.text.template import THINKING
from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.answer_format import AnswerFormat
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.text.chat import render_marked

ChoiceMode = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Calls that an answer may or must have.

    Attributes:
        mode: `auto` leaves it to the model, `none` forbids calls, `required` asks for at least
            one, `named` for a certain one.
        name: of the tool, for `named`.
    """

    mode: ChoiceMode = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and everything that shapes the answer beside sampling.

    Attributes:
        messages: as OpenAI's chats have them.
        tools: likewise.
        choice: of tools.
        parallel: an answer may have several calls.
        format: of the answer's content.
        thinking: switch of the template; None leaves it to the template.
        template_arguments: others.
        budget: tokens of reasoning at most; None for the server's own limit.
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
        """Tools that the model is told of."""
        return () if self.choice.mode == "none" else self.tools

    @property
    def limited(self) -> bool:
        """True if the answer follows a grammar: of its content, or of calls."""
        if self.format is not None:
            return True
        strict = any(tool.get("function", tool).get("strict") for tool in self.offered)
        return self.choice.mode in ("required", "named") or strict


def encode(model: Model, conversation: Conversation) -> list[int]:
    """Token ids of the prompt.

    Raises:
        RequestError, ApiError: a conversation that cannot be rendered, or is too long.
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
    """True if the template knows the switch."""
    return model.template is not None and THINKING in model.template.source
