"""A conversation as the prompt for its next turn."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from lowbit.formats.errors import RequestError
from lowbit.formats.text.length import MAX_PROMPT_BYTES
from lowbit.formats.text.marked import MarkedText
from lowbit.formats.text.template import ChatTemplate
from lowbit.runtime.text.control_tokens import ControlTokens, choose_mark, texts_of
from lowbit.runtime.text.messages import plain_message
from lowbit.runtime.text.reasoning import CLOSE, OPEN
from lowbit.runtime.text.template_arguments import check_arguments, split_thinking
from lowbit.runtime.text.tools import CLOSE_CALL, OPEN_CALL, Tool

# Markers that a model writes in its answers, and that templates look for in them.
OF_ANSWERS = frozenset((OPEN, CLOSE, OPEN_CALL, CLOSE_CALL))


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
    tools: Sequence[Tool] = (),
    template_arguments: Mapping[str, Any] | None = None,
) -> str:
    """The prompt that asks for the assistant's next turn, as transformers renders it.

    Control tokens that a message spells are in it as the template's own are: `render_marked` tells
    them apart.

    Args:
        template: of the model.
        messages: the conversation so far, as the OpenAI API has it.
        thinking: `enable_thinking` of the template; None leaves it to the template.
        max_bytes: longest prompt that is of use.
        tools: functions that the model may call.
        template_arguments: further arguments of the template, plain JSON; `enable_thinking` is the
            same as `thinking`.

    Raises:
        RequestError: a bad message, one that the template refuses, too long a conversation, or a
            template that does not know tools, the thinking switch or an argument.
        CheckpointError: the template is not valid jinja2.
    """
    return render_marked(
        template,
        None,
        messages,
        thinking,
        max_bytes,
        tools=tools,
        template_arguments=template_arguments,
    ).text


def render_marked(
    template: ChatTemplate,
    control: ControlTokens | None,
    messages: Sequence[Mapping[str, Any]],
    thinking: bool | None = None,
    max_bytes: int = MAX_PROMPT_BYTES,
    *,
    tools: Sequence[Tool] = (),
    template_arguments: Mapping[str, Any] | None = None,
) -> MarkedText:
    """The prompt as in `render_prompt`, with marks in what only looks like a control token.

    That is every control token in a message, a tool or an argument of the template. The content of
    an assistant's message keeps the markers of reasoning and of calls, which a model writes and a
    template looks for; all others are marked there too.

    Args:
        template: of the model.
        control: tokens of the model's tokenizer; None marks nothing.
        messages: see `render_prompt`, as all others.
        thinking: see there.
        max_bytes: see there.
        tools: see there.
        template_arguments: see there.

    Raises:
        RequestError: see there.
        CheckpointError: see there.
    """
    plain = plain_messages(messages)
    if tools and "tools" not in template.source:
        raise RequestError("the chat template does not know tools", hint="leave out `tools`")
    thinking, arguments = split_thinking(template_arguments or {}, thinking)
    check_arguments(arguments, template)
    offered = [tool.given for tool in tools]
    given = [plain, offered, arguments]
    mark = ""
    if control is not None and any(map(control.held_by, texts_of(given))):
        mark = choose_mark([template.source, *texts_of(given)])
        try:
            plain, offered, arguments = _marked(control, mark, plain, offered, arguments)
        except RecursionError:
            raise RequestError("the messages are nested too deeply") from None
    text = template.render(plain, thinking, tools=offered, arguments=arguments, max_bytes=max_bytes)
    if mark:
        text = text.replace(json.dumps(mark)[1:-1], mark)  # a template may write JSON in ASCII
    return MarkedText(text, mark)


def _marked(
    control: ControlTokens,
    mark: str,
    messages: list[dict[str, Any]],
    tools: list[Mapping[str, Any]],
    arguments: dict[str, Any],
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]], dict[str, Any]]:
    """Messages, tools and arguments with marks."""
    marked = [control.marked(message, mark) for message in messages]
    for message, given in zip(marked, messages, strict=True):
        if given["role"] == "assistant":
            message["content"] = control.marked(given["content"], mark, OF_ANSWERS)
    return marked, control.marked(tools, mark), control.marked(arguments, mark)


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
