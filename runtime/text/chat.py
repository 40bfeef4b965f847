"""A conversation as the prompt for its next turn."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from lowbit.formats.errors import RequestError
from lowbit.formats.text.length import MAX_PROMPT_BYTES
from lowbit.formats.text.template import ChatTemplate

ROLES = ("system", "user", "assistant", "tool")


class Message(TypedDict):
    """One turn: `role` is system, user, assistant or tool."""

    role: str
    content: str


def render_prompt(
    template: ChatTemplate,
    messages: Sequence[Message],
    thinking: bool | None = None,
    max_bytes: int = MAX_PROMPT_BYTES,
) -> str:
    """The prompt that asks for the assistant's next turn.

    Args:
        template: of the model.
        messages: the conversation so far.
        thinking: `enable_thinking` of the template; None leaves it to the template.
        max_bytes: longest prompt that is of use.

    Raises:
        RequestError: a bad message, one that the template refuses, too long a conversation, or a
            template without the thinking switch.
        CheckpointError: the template is not valid jinja2.
    """
    check_messages(messages)
    return template.render(messages, thinking, max_bytes=max_bytes)


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse an empty conversation and malformed messages.

    Raises:
        RequestError: names the message and what is wrong with it.
    """
    if not messages:
        raise RequestError("the conversation is empty", hint="give at least one user message")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {number} is not an object with `role` and `content`")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError(
                f"message {number}: role `{role}` is not known", hint=f"use {', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            raise RequestError(f"message {number}: `content` must be text, got {content!r:.80}")
