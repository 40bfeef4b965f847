"""Interface of a chat to its model, which is loaded here or answers behind a server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lowbit.runtime.conversation.settings import AnswerSettings

if TYPE_CHECKING:
    from lowbit.runtime.engine.model import Model
    from lowbit.runtime.engine.stream import Generation
    from lowbit.runtime.state.sampler import SamplingParams
    from lowbit.runtime.text.answer import Piece
    from lowbit.runtime.text.chat import Message


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages that ask for an answer, and the tokens that they become."""

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

    def stream(self, prompt: ChatPrompt, settings: AnswerSettings) -> AnswerStream:
        """The answer to a prompt; nothing runs before its first piece.

        Raises:
            RequestError: the prompt does not fit the context, or as `AnswerSettings.keywords`.
        """


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A `ChatModel` of this process."""

    model: "Model"

    @property
    def context(self) -> int:
        """See `ChatModel`."""
        return self.model.context

    @property
    def defaults(self) -> "SamplingParams":
        """See `ChatModel`."""
        return self.model.defaults

    @property
    def has_template(self) -> bool:
        """See `ChatModel`."""
        return self.model.template is not None

    def encode(self, messages: "Sequence[Message]", thinking: bool | None = None) -> ChatPrompt:
        """See `ChatModel`."""
        return ChatPrompt(messages, thinking, self.model.encode(messages, thinking=thinking))

    def stream(self, prompt: ChatPrompt, settings: AnswerSettings) -> AnswerStream:
        """See `ChatModel`."""
        return self.model.stream_ids(prompt.ids, **settings.keywords(self.model))
