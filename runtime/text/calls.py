"""Tool calls in the two forms that chat templates teach.

json: `{"name": "f", "arguments": {...}}` between the tags of a call.

xml: `<function=f><parameter=x>value</parameter></function>`, which is no XML: values are not
escaped. A value therefore ends at the first closing tag that is followed by what may follow it, and
the line breaks that the template puts around it are no part.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from lowbit.runtime.text.tools import (
    CLOSE_CALL,
    NAME,
    OPEN_CALL,
    CallForm,
    Tool,
    read_json,
    schema_of,
    typed_value,
    write_json,
)

_BEGIN = re.compile(r"\s*(?:\{|\Z)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
OPEN_FUNCTION, CLOSE_VALUE = "<function=", "</parameter>"
MAX_BEGIN = 400  # characters in which the name of the function must have ended
FUNCTION = re.compile(rf"\s*<function=({NAME.pattern})>\s*")
PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
NEXT_VALUE = re.compile(r"</parameter>\s*(?=<parameter=[^>\n]+>)")
END_OF_VALUE = re.compile(r"</parameter>\s*(?:(?=<parameter=[^>\n]+>)|(?P<end></function>\s*\Z))")
_END = re.compile(r"</function>\s*\Z")
Unfinished = Literal["unfinished"]
UNFINISHED: Final = "unfinished"  # a closing tag that is part of a value: the call goes on


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call."""

    name: str
    arguments: str  # a JSON object


def may_become_call(form: CallForm, body: str, tools: Mapping[str, Tool]) -> bool:
    """True if the beginning of what follows the opening tag allows a call."""
    if form == "json":
        return _BEGIN.match(body) is not None
    begin = body[:MAX_BEGIN].lstrip()
    if not begin.startswith(OPEN_FUNCTION):
        return OPEN_FUNCTION.startswith(begin)
    name, closed, _ = begin[len(OPEN_FUNCTION) :].partition(">")
    return name in tools if closed else any(tool.startswith(name) for tool in tools)


def read_call(form: CallForm, body: str, tools: Mapping[str, Tool]) -> Call | Unfinished | None:
    """The call between two tags.

    Returns:
        UNFINISHED if the closing tag stands in a value; None if the text is no call.
    """
    return _read_json(body, tools) if form == "json" else _read_xml(body, tools)


def _read_json(body: str, tools: Mapping[str, Tool]) -> Call | Unfinished | None:
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


def _read_xml(body: str, tools: Mapping[str, Tool]) -> Call | Unfinished | None:
    function = FUNCTION.match(body)
    if function is None or function[1] not in tools:
        return None
    tool = tools[function[1]]
    arguments: dict[str, Any] = {}
    at = function.end()
    while not _END.match(body, at):
        parameter = PARAMETER.match(body, at)
        if parameter is None:
            return None
        end = END_OF_VALUE.search(body, parameter.end())
        text = body[parameter.end() : end.start() if end else None]
        if _holds_another_call(text):
            return None
        if end is None:
            return UNFINISHED
        name, text = parameter[1], text.removeprefix("\n").removesuffix("\n")
        arguments[name] = typed_value(text, schema_of(name, tool.schema), tool.types)
        if end["end"] is not None:
            break
        at = end.end()
    try:
        return Call(function[1], write_json(arguments))
    except ValueError:
        return None


def _holds_another_call(value: str) -> bool:
    """True if a value runs on into the next call, because its own closing tag is missing."""
    closed = value.find(CLOSE_CALL)
    return 0 <= closed < value.find(OPEN_CALL)
