"""A message of the OpenAI API as chat templates need it."""

from collections.abc import Mapping
from typing import Any

from lowbit.formats.errors import RequestError
from lowbit.formats.text.template import REASONING
from lowbit.runtime.text.plain_json import read_json

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = ("name", "tool_call_id", *REASONING)  # keys whose values are text or null


def plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One message: its content is text, and the arguments of its calls are objects.

    Args:
        message: `role` and `content`, which is text or a list of text parts; of an assistant also
            `tool_calls` and `reasoning_content` or `reasoning`; of a tool `tool_call_id`; `name`.
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
    plain["content"] = _text_of(message, where)
    if calls is not None:
        if not isinstance(calls, list):
            raise RequestError(f"{where}: `tool_calls` must be a list, got {calls!r:.80}")
        plain["tool_calls"] = [
            _plain_call(call, f"{where}: tool call {number}")
            for number, call in enumerate(calls, start=1)
        ]
    return plain


def _text_of(message: Mapping[str, Any], where: str) -> str:
    """The content as one text; an assistant that only thought or called has none."""
    content = message.get("content")
    if content is None and message["role"] == "assistant" and _said_otherwise(message):
        return ""
    if isinstance(content, list):
        parts = enumerate(content, start=1)
        return "".join(_part(part, f"{where}: part {number}") for number, part in parts)
    if not isinstance(content, str):
        raise RequestError(f"{where}: `content` must be text, got {content!r:.80}")
    return content


def _said_otherwise(message: Mapping[str, Any]) -> bool:
    return any(message.get(key) is not None for key in ("tool_calls", *REASONING))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise RequestError(
            f"{where} of its content is {kind!r:.80}, only text is supported",
            hint='a part is {"type": "text", "text": ...}',
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}: `text` must be text, got {part.get('text')!r:.80}")
    text: str = part["text"]
    return text


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    """A call of an earlier turn, with its arguments as an object."""
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
