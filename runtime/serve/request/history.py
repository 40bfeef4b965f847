"""Earlier turns as a chat template can take them: a call that was cut becomes text."""

from collections.abc import Iterable, Mapping
from typing import Any

from lowbit.runtime.text.tools import read_json


def with_cut_calls_as_text(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages in which every call has an object as its arguments.

    An answer that ends by its length may end inside a call, and clients send that back. The call
    moves into the content, with its name and as much of its arguments as there is.
    """
    return [_mended(message) if message.get("tool_calls") else message for message in messages]


def _mended(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message["tool_calls"]
    whole = [call for call in calls if _is_whole(call)]
    if len(whole) == len(calls):
        return message
    texts = [message.get("content") or ""]
    for call in calls:
        if not _is_whole(call):
            function = call["function"]
            texts.append(f"[call of {function['name']} that was cut: {function['arguments']}]")
    content = "\n".join(text for text in texts if text)
    return {**message, "content": content, "tool_calls": whole or None}


def _is_whole(call: Mapping[str, Any]) -> bool:
    arguments = call["function"]["arguments"]
    try:
        return isinstance(read_json(arguments or "{}"), dict | None)
    except ValueError:
        return False
