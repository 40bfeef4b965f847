"""A conversation as the prompt for its next turn, and how the answer to a prompt begins."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, dropwhile
from typing import Any, TypedDict

from lowbit.formats.errors import RequestError
from lowbit.formats.text.template import MAX_PROMPT_BYTES, REASONING, THINKING, ChatTemplate
from lowbit.formats.text.tokenizer import MarkedText
from lowbit.formats.text.worker import Ask, blocking
from lowbit.runtime.text.answer import CLOSE, OPEN, OutputStart
from lowbit.runtime.text.images import IMAGES, INSTEAD, for_template, image_parts, word_of
from lowbit.runtime.text.last_turn import PromptEnd, render_open
from lowbit.runtime.text.tokenizer import ControlTokens, Tokenizer
from lowbit.runtime.text.tools import CLOSE_CALL, OPEN_CALL, Tool, is_plain, knows_tools, read_json

# Markers that a model writes in its answers, and that templates look for in them.
OF_ANSWERS = frozenset((OPEN, CLOSE, OPEN_CALL, CLOSE_CALL))
SYSTEM_ROLES = ("system", "developer")
SHOWN_BY = ("user", "tool")  # roles of messages that may have images
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = ("name", "tool_call_id", *REASONING)  # keys whose values are text or null
MAX_DEPTH = 16  # of a template's argument
# Names that mean something else in a template, or that the server itself fills in.
RESERVED = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now", "namespace", "dict", "range", "lipsum", "cycler"),
        *("joiner", "loop", "self", "super", "caller", "varargs", "kwargs", "context", "true"),
        *("false", "none"),
    )
)
_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
# Characters that stand for nothing, and then those for private use.
MARKS = (range(0xFDD0, 0xFDF0), range(0xE000, 0xF900))


class Message(TypedDict):
    """One turn: `role` is system, developer, user, assistant or tool.

    `plain_message` tells what else a message may hold.
    """

    role: str
    content: str | list[dict[str, Any]]


async def render_prompt_later(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    thinking: bool | None = None,
    max_bytes: int = MAX_PROMPT_BYTES,
    *,
    control: ControlTokens | None = None,
    tools: Sequence[Tool] = (),
    template_arguments: Mapping[str, Any] | None = None,
    ask: Ask | None = None,
    end: PromptEnd = "next",
) -> MarkedText:
    """A prompt, as transformers renders it.

    Every control token in a message, a tool or an argument of the template is marked as plain text.
    The content of an assistant's message keeps the markers of reasoning and of calls, which a model
    writes and a template looks for; all others are marked there too.

    Args:
        thinking: `enable_thinking` of the template; None leaves it to the template.
        max_bytes: longest prompt that is of use.
        control: tokens of the model's tokenizer; None marks nothing.
        template_arguments: further arguments of the template, plain JSON; `enable_thinking` is the
            same as `thinking`.
        ask: see `ChatTemplate.render_later`.
        end: where the prompt ends.

    Raises:
        RequestError: a bad message, one that the template refuses, too long a conversation, a
            template that does not know tools, the thinking switch or an argument, or a last
            message that cannot be continued.
        CheckpointError: the template is not valid jinja2.
    """
    plain = [
        for_template(each, f"message {number}")
        for number, each in enumerate(plain_messages(messages), start=1)
    ]
    if tools and not knows_tools(template):
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
    render = partial(
        template.render_later,
        thinking=thinking,
        tools=offered,
        arguments=arguments,
        answer=end == "next",
        max_bytes=max_bytes,
        ask=ask,
    )
    if end == "last":
        behind = choose_mark([template.source, mark, *texts_of(given)])
        text = await render_open(render, plain, behind)
    else:
        text = await render(plain)
    if mark:
        text = text.replace(json.dumps(mark)[1:-1], mark)  # a template may write JSON in ASCII
    return MarkedText(text, mark)


render_prompt = blocking(render_prompt_later)


def _marked(
    control: ControlTokens,
    mark: str,
    messages: list[dict[str, Any]],
    tools: list[Mapping[str, Any]],
    arguments: dict[str, Any],
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]], dict[str, Any]]:
    marked = [control.marked(message, mark) for message in messages]
    for message, given in zip(marked, messages, strict=True):
        if given["role"] == "assistant":
            message["content"] = control.marked(given["content"], mark, OF_ANSWERS)
    return marked, control.marked(tools, mark), control.marked(arguments, mark)


def has_late_system(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if a system message stands behind another message; some templates refuse that."""
    return any(message.get("role") in SYSTEM_ROLES for message in messages[1:])


def one_system_message(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with at most one system message, at the beginning.

    The first ones are joined by a blank line. Later ones stay at their place, as a turn of the
    user's between `<system>` and `</system>`.

    Raises:
        RequestError: a bad message.
    """
    plain = plain_messages(messages)
    rest = list(dropwhile(lambda message: message["role"] == "system", plain))
    leading = [message["content"] for message in plain[: len(plain) - len(rest)]]
    found = [{"role": "system", "content": "\n\n".join(leading)}] if leading else []
    for message in rest:
        late = message["role"] == "system"
        text = f"<system>\n{message['content']}\n</system>"
        found.append({"role": "user", "content": text} if late else message)
    return found


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


def plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One message: content is text, or parts where there are images; arguments are objects.

    Args:
        message: `role` and `content`, which is text or a list of parts: text, and of a user or a
            tool also images, see `runtime.text.images`; of an assistant also `tool_calls` and
            `reasoning_content` or `reasoning`; of a tool `tool_call_id`; `name`.
        where: the message, for errors.

    Raises:
        RequestError: says what is wrong with it.
    """
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is not an object with `role` and `content`")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}: role `{role}` is not known", hint=f"use {', '.join(ROLES)}")
    for key in TEXTS:
        if not isinstance(message.get(key), str | None):
            raise RequestError(f"{where}: `{key}` must be text, got {message[key]!r:.80}")
    calls = message.get("tool_calls")
    if calls is not None and role != "assistant":
        raise RequestError(f"{where}: only an assistant has `tool_calls`, the role is `{role}`")
    plain = dict(message)
    plain["role"] = "system" if role == "developer" else role
    plain["content"] = _content_of(message, where)
    if calls is not None:
        if not isinstance(calls, list):
            raise RequestError(f"{where}: `tool_calls` must be a list, got {calls!r:.80}")
        plain["tool_calls"] = [
            _plain_call(call, f"{where}: tool call {number}")
            for number, call in enumerate(calls, start=1)
        ]
    return plain


def _content_of(message: Mapping[str, Any], where: str) -> str | list[dict[str, Any]]:
    """The content as one text; an assistant that only thought or called has none.

    With images, it is a list of parts, texts between two images as one.
    """
    content = message.get("content")
    if content is None and message["role"] == "assistant" and _said_otherwise(message):
        return ""
    if isinstance(content, list):
        parts = enumerate(content, start=1)
        if image_parts(content):
            return _with_images(content, message["role"], where)
        return "".join(_part(part, f"{where}: part {number}") for number, part in parts)
    if not isinstance(content, str):
        raise RequestError(f"{where}: `content` must be text, got {content!r:.80}")
    return content


def _with_images(content: Sequence[Any], role: str, where: str) -> list[dict[str, Any]]:
    if role not in SHOWN_BY:
        raise RequestError(
            f"{where} has an image, and its role is `{role}`",
            hint=f"only messages of {' and '.join(SHOWN_BY)} have images",
        )
    found: list[dict[str, Any]] = []
    for number, part in enumerate(content, start=1):
        if isinstance(part, Mapping) and part.get("type") in IMAGES:
            found.append(dict(part))
            continue
        text = _part(part, f"{where}: part {number}")
        if found and found[-1]["type"] == "text":
            found[-1]["text"] += text
        else:
            found.append({"type": "text", "text": text})
    return found


def _said_otherwise(message: Mapping[str, Any]) -> bool:
    return any(message.get(key) is not None for key in ("tool_calls", *REASONING))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise RequestError(
            f"{where} of its content is {kind!r:.80}, only text and images are supported",
            hint=INSTEAD.get(word_of(kind), 'a part is {"type": "text", "text": ...}'),
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}: `text` must be text, got {part.get('text')!r:.80}")
    text: str = part["text"]
    return text


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise RequestError(f"{where} is not an object with `function`")
    if call.get("type", "function") != "function":
        raise RequestError(f"{where}: type {call['type']!r:.80} is not supported")
    function = call["function"]
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: `name` must be text, got {function.get('name')!r:.80}")
    arguments = _arguments(function.get("arguments"), where)
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(given: Any, where: str) -> dict[str, Any]:
    try:
        arguments = read_json(given or "{}") if isinstance(given, str) else given
    except ValueError as error:
        raise RequestError(f"{where}: `arguments` is not valid JSON: {error}") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}: `arguments` must be a JSON object, got {given!r:.80}")
    return arguments


def split_thinking(
    arguments: Mapping[str, Any], thinking: bool | None
) -> tuple[bool | None, dict[str, Any]]:
    """The thinking switch, given beside the arguments or among them, and the other arguments.

    Raises:
        RequestError: the switch is no flag, or is given twice and differs; arguments are no object.
    """
    if not isinstance(arguments, Mapping):
        raise RequestError(f"the template's arguments must be an object, got {arguments!r:.80}")
    others = {name: value for name, value in arguments.items() if name != THINKING}
    given = arguments.get(THINKING)
    if given is None:
        return thinking, others
    if not isinstance(given, bool):
        raise RequestError(f"`{THINKING}` must be true or false, got {given!r:.80}")
    if thinking is not None and thinking != given:
        raise RequestError(f"`{THINKING}` is {given}, but thinking is asked to be {thinking}")
    return given, others


def check_arguments(arguments: Mapping[str, Any], template: ChatTemplate) -> None:
    """Refuse arguments that the template does not know, or that are not the request's to give.

    Raises:
        RequestError: names the argument.
    """
    for name, value in arguments.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(f"the template's argument {name!r:.80} is not a name")
        if name in RESERVED or name in template.special_tokens:
            raise RequestError(f"the template's argument `{name}` cannot be given")
        if not knows_argument(template, name):
            raise RequestError(f"the chat template does not know the argument `{name}`")
        if not is_plain(value, MAX_DEPTH):
            raise RequestError(f"the template's argument `{name}` is not plain JSON")


def knows_argument(template: ChatTemplate, name: str) -> bool:
    """True if a template names an argument."""
    return name in _words_of(template.source)


@lru_cache(8)  # a request may bring a million names
def _words_of(source: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", source))


def choose_mark(texts: Iterable[str]) -> str:
    """A character that none of the texts has, neither itself nor as an escape of JSON.

    Raises:
        RequestError: they have all that could be taken.
    """
    used: set[str] = set()
    escaped: set[str] = set()
    for text in texts:
        used.update(text)
        escaped.update(found.lower() for found in re.findall(r"\\u([0-9a-fA-F]{4})", text))
    for code in chain(*MARKS):
        if chr(code) not in used and f"{code:04x}" not in escaped:
            return chr(code)
    raise RequestError(
        "a conversation that spells control tokens has every character for private use",
        hint="leave out one of them",
    )


def texts_of(value: Any) -> Iterator[str]:
    """Every text of plain JSON, keys of objects included, however deep it nests."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left += each
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each


def output_start(prompt: Sequence[int], tokenizer: Tokenizer) -> OutputStart:
    """Start of the answer to a prompt that a chat template made."""
    for id in reversed(prompt):
        if tokenizer.token_bytes(id).strip() or id in tokenizer.special_ids:
            return "reasoning" if id == tokenizer.token_id(OPEN) else "answer"
    return "answer"
