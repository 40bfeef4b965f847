"""A chat: the model that answers, the settings of its answers, and the conversation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.runtime.conversation.turns import Conversation, fitted

if TYPE_CHECKING:
    from lowbit.runtime.engine.model import Model, Options
    from lowbit.runtime.engine.span import ImageSpan
    from lowbit.runtime.engine.stream import Generation
    from lowbit.runtime.state.sampling_params import SamplingParams
    from lowbit.runtime.text.answer import Piece
    from lowbit.runtime.text.chat import Message


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Everything of a request but its prompt."""

    # Parameters by name; those left out are the model's
    sampling: Mapping[str, Any] = field(default_factory=dict)
    # Longest answer; None for as many tokens as the context holds
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    # Switches a reasoning model's thinking; None leaves it to the template
    thinking: bool | None = None
    raw: bool = False  # continue the prompt as it is, without a template
    max_thinking_tokens: int | None = None
    json_schema: dict[str, Any] | None = None
    system: str | None = None  # message before a prompt that is text

    def params(self, defaults: "SamplingParams") -> "SamplingParams":
        """Sampling parameters of a model with these defaults.

        Raises:
            RequestError: a value is out of its range.
        """
        return replace(defaults, **self.sampling)

    def prompt(self, text: str, images: Sequence[str] = ()) -> "str | list[Message]":
        """A text as the prompt for an answer, with `data:` URLs of images that it asks about."""
        asked = Conversation(self.system, shown=tuple(images))
        return text if self.raw else asked.prompt(text)

    def keywords(self, model: "Model") -> "Options":
        """Keywords of a request to a model.

        Raises:
            RequestError: a sampling parameter is out of its range, or the schema cannot be used.
        """
        schema = self.json_schema
        return {
            "sampling": self.params(model.defaults),
            "max_new_tokens": self.max_new_tokens,
            "stop": self.stop,
            "raw": self.raw,
            "max_thinking_tokens": self.max_thinking_tokens,
            "grammar": None if schema is None else model.grammars.json_schema(schema),
        }


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages that ask for an answer, and the tokens that they become."""

    messages: "Sequence[Message]"
    thinking: bool | None
    ids: Sequence[int]
    images: "tuple[ImageSpan, ...]" = ()


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
        made = self.model.encode_prompt(messages, thinking)
        return ChatPrompt(messages, thinking, made.ids, made.images)

    def stream(self, prompt: ChatPrompt, settings: AnswerSettings) -> AnswerStream:
        """See `ChatModel`."""
        keywords = settings.keywords(self.model)
        return self.model.stream_ids(prompt.ids, images=prompt.images, **keywords)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation with a model; every change makes a new one."""

    model: "ChatModel"
    name: str
    # Settings of every answer; the system message is the conversation's
    settings: AnswerSettings = field(default_factory=AnswerSettings)
    conversation: Conversation = field(default_factory=Conversation)
    last: "Generation | None" = None
    # The conversation that `last` ended, whose tokens need not be counted again
    measured: Conversation | None = None
    file: Path | None = None  # saved to or loaded from last

    @property
    def sampling(self) -> "SamplingParams":
        """Sampling parameters of the next answer."""
        return self.settings.params(self.model.defaults)


def check_model(chat: Chat) -> None:
    """Refuse a model that cannot chat, or not as asked.

    Raises:
        RequestError: no chat template, or one that refuses the system message or the thinking.
        CheckpointError: the template is damaged.
    """
    if not chat.model.has_template:
        raise RequestError(
            f"`{chat.name}` has no chat template, so it cannot chat",
            hint="lowbit-run generate --raw lets it continue a text",
        )
    check_thinking(chat, chat.settings.thinking)


def check_thinking(chat: Chat, thinking: bool | None) -> None:
    """Render a question, so that the template refuses before the first one.

    Raises:
        RequestError: the template has no thinking switch, or refuses the system message.
        CheckpointError: the template is damaged.
    """
    chat.model.encode(chat.conversation.prompt("Hi"), thinking)


def with_room(
    chat: Chat, conversation: Conversation, question: str
) -> "tuple[Conversation, ChatPrompt]":
    """Drop the oldest turns where the context demands it.

    Returns:
        The conversation, and the prompt that ends with the question.

    Raises:
        RequestError: the question is much longer than the context, or the template refuses it.
        CheckpointError: the tokenizer or the template is damaged.
    """
    encoded: dict[int, ChatPrompt] = {}  # by the number of messages
    thinking = chat.settings.thinking

    def count_tokens(messages: "Sequence[Message]") -> int:
        try:
            prompt = encoded[len(messages)] = chat.model.encode(messages, thinking)
        except RequestError:  # too long; any other reason is met again below
            return chat.model.context + 1
        return len(prompt.ids)

    most = chat.settings.max_new_tokens
    seen = fitted(conversation, question, count_tokens, chat.model.context, most)
    messages = seen.prompt(question)
    prompt = encoded.get(len(messages))
    return seen, chat.model.encode(messages, thinking) if prompt is None else prompt


def used_tokens(chat: Chat) -> int | None:
    """Tokens of the context in use; None where the template cannot render the conversation.

    After an answer they are its prompt and its tokens, reasoning included. After a command that
    changed the conversation they are the tokens that the next prompt begins with. The last token
    of an answer needs no place, and turns that find none are dropped: more than all is never used.
    """
    conversation, last, context = chat.conversation, chat.last, chat.model.context
    if last is not None and conversation is chat.measured:
        return min(len(last.prompt_token_ids) + len(last.token_ids), context)
    if conversation.dropped == len(conversation.turns):
        return 0
    try:
        return min(len(chat.model.encode(conversation.seen(), chat.settings.thinking).ids), context)
    except LowbitError:
        return None
