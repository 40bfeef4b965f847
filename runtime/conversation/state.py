"""State of a chat: the model, the settings, and the conversation."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.runtime.conversation.settings import AnswerSettings
from lowbit.runtime.conversation.turns import Conversation, fitted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lowbit.runtime.conversation.chat_model import ChatModel, ChatPrompt
    from lowbit.runtime.engine.stream import Generation
    from lowbit.runtime.state.sampler import SamplingParams
    from lowbit.runtime.text.chat import Message


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation with a model; every change makes a new one.

    Attributes:
        settings: of every answer; the system message is the conversation's.
        measured: the conversation that `last` ended, whose tokens need not be counted again.
        file: saved to or loaded from last.
    """

    model: "ChatModel"
    name: str
    settings: AnswerSettings = field(default_factory=AnswerSettings)
    conversation: Conversation = field(default_factory=Conversation)
    last: "Generation | None" = None
    measured: Conversation | None = None
    file: Path | None = None

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
