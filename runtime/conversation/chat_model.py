"""Interface of a chat to its model, which is loaded here or answers behind a server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lowbit.runtime.engine.model import Model
    from lowbit.runtime.engine.stream import Generation
    from lowbit.runtime.state.sampler import SamplingParams
    from lowbit.runtime.text.answer import Piece
    from lowbit.runtime.text.chat import Message
    from lowbit.runtime.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages that ask for an answer, and the tokens that they become.

    Attributes:
        thinking: switches a reasoning model's thinking; None leaves it to the template.
    """

    messages: "Sequence[Message]"
    thinking: bool | None
    ids: Sequence[int]


class AnswerStream(Protocol):
    """An answer while it is made."""

    @property
    def pieces(self) -> "Iterator[Piece]":
        """The text; iterate it, then read `generation`."""

    @property
    def generation(self) -> "Generation":
        """The result, once `pieces` is exhausted."""

    def close(self) -> None:
        """Stop early."""


class ChatModel(Protocol):
    """A model that chats."""

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""

    @property
    def defaults(self) -> "SamplingParams":
        """The model's own sampling parameters."""

    @property
    def has_template(self) -> bool:
        """False if the model cannot chat."""

    def encode(self, messages: "Sequence[Message]", thinking: bool | None = None) -> ChatPrompt:
        """The prompt of messages.

        Raises:
            LowbitError: the template refuses them, or they are much longer than the context.
        """

    def stream(
        self,
        prompt: ChatPrompt,
        *,
        sampling: "SamplingParams",
        max_new_tokens: int | None,
        stop: Sequence[str],
        max_thinking_tokens: int | None,
    ) -> AnswerStream:
        """The answer to a prompt; nothing runs before its first piece.

        Raises:
            RequestError: the prompt does not fit the context.
        """


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of this process that chats.

    Attributes:
        grammar: of every answer; None for any text.
    """

    model: "Model"
    grammar: "Grammar | None" = None

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.model.context

    @property
    def defaults(self) -> "SamplingParams":
        """The model's own sampling parameters."""
        return self.model.defaults

    @property
    def has_template(self) -> bool:
        """False if the model cannot chat."""
        return self.model.template is not None

    def encode(self, messages: "Sequence[Message]", thinking: bool | None = None) -> ChatPrompt:
        """See `ChatModel`."""
        return ChatPrompt(messages, thinking, self.model.encode(messages, thinking=thinking))

    def stream(
        self,
        prompt: ChatPrompt,
        *,
        sampling: "SamplingParams",
        max_new_tokens: int | None,
        stop: Sequence[str],
        max_thinking_tokens: int | None,
    ) -> AnswerStream:
        """See `ChatModel`."""
        return self.model.stream_ids(
            prompt.ids,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            stop=stop,
            max_thinking_tokens=max_thinking_tokens,
            grammar=self.grammar,
        )
