"""A conversation as the prompt for its next turn."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from lowbit.formats.errors import RequestError
from lowbit.formats.text.length import MAX_PROMPT_BYTES
from lowbit.formats.text.template import ChatTemplate
from lowbit.runtime.text.messages import plain_message
from lowbit.runtime.text.template_arguments import check_arguments, split_thinking
from lowbit.runtime.text.tools import read_tools


class Message(TypedDict):
    """One turn: `role` is system, developer, user, assistant or tool.

    `plain_message` tells what else a message may hold.
    """

    role: str
    content: str


def render_prompt(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    thinking: bool | None = None,
    max_bytes: int = MAX_PROMPT_BYTES,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> str:
    """The prompt that asks for the assistant's next turn.

    Args:
        template: of the model.
        messages: the conversation so far, as the OpenAI API has it.
        thinking: `enable_thinking` of the template; None leaves it to the template.
        max_bytes: longest prompt that is of use.
        tools: functions that the model may call, as `read_tools` takes them.
        template_arguments: further arguments of the template, plain JSON; `enable_thinking` is the
            same as `thinking`.

    Raises:
        RequestError: a bad message, one that the template refuses, too long a conversation, or a
            template that does not know tools, the thinking switch or an argument.
        CheckpointError: the template is not valid jinja2.
    """
    plain = plain_messages(messages)
    if read_tools(tools) and "tools" not in template.source:
        raise RequestError("the chat template does not know tools", hint="leave out `tools`")
    thinking, arguments = split_thinking(template_arguments or {}, thinking)
    check_arguments(arguments, template)
    return template.render(plain, thinking, tools=tools, arguments=arguments, max_bytes=max_bytes)


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates need them.

    Raises:
        RequestError: an empty conversation, or a bad message: names it and what is wrong with it.
    """
    if not messages:
        raise RequestError("the conversation is empty", hint="give at least one user message")
    return [
        plain_message(message, f"message {number}")
        for number, message in enumerate(messages, start=1)
    ]
