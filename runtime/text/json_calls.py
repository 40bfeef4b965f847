"""Tool calls as JSON: `{"name": "f", "arguments": {...}}` between the tags of a call."""

import re
from collections.abc import Mapping

from lowbit.runtime.text.call import UNFINISHED, Call, Unfinished
from lowbit.runtime.text.plain_json import read_json, write_json
from lowbit.runtime.text.tools import Tool

_BEGIN = re.compile(r"\s*(?:\{|\Z)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def may_become_call(body: str, tools: Mapping[str, Tool]) -> bool:
    """Tell if the beginning of what follows the opening tag allows a call."""
    return _BEGIN.match(body) is not None


def read_call(body: str, tools: Mapping[str, Tool]) -> Call | Unfinished | None:
    """The call between two tags.

    Args:
        body: text between the opening tag and a closing one.
        tools: that may be called, by name.

    Returns:
        UNFINISHED if the closing tag stands in a string; None if the text is no call.
    """
    try:
        content = read_json(body)
    except ValueError:
        return UNFINISHED if '"' in _STRING.sub("", body) else None
    name = content.get("name") if isinstance(content, dict) else None
    if not isinstance(name, str) or name not in tools:
        return None
    arguments = content.get("arguments")
    try:
        if isinstance(arguments, str):  # an object in a string, as the API has it
            arguments = read_json(arguments or "{}")
        if arguments is None:
            arguments = {}
        return Call(name, write_json(arguments)) if isinstance(arguments, dict) else None
    except ValueError:
        return None
