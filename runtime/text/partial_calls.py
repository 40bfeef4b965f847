"""Arguments of calls that are still being written, as pieces of one JSON object.

A call is begun once its beginning is certain: `{"name": "f", "arguments": {` of a known tool, or
`<function=f><parameter=x>`. The last brace is left to `finish`, which compares the pieces with the
whole call: they join to valid JSON only if that is a call, and the same.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lowbit.runtime.text.call import Call
from lowbit.runtime.text.plain_json import read_json, write_json
from lowbit.runtime.text.stops import longest_overlap
from lowbit.runtime.text.tools import NAME, Tool
from lowbit.runtime.text.typed_values import schema_of, typed_value
from lowbit.runtime.text.xml_calls import (
    CLOSE_VALUE,
    END_OF_VALUE,
    FUNCTION,
    NEXT_VALUE,
    PARAMETER,
)

_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*"({NAME.pattern})"\s*,\s*"arguments"\s*:\s*(?=\{{)')
_CONTROL: Final = {chr(code): write_json(chr(code))[1:-1] for code in range(32)}


class PartialCall(Protocol):
    """A call that is being written.

    Attributes:
        name: of the function; None as long as the beginning is not certain.
        sent: characters of the body that the pieces so far stand for.
    """

    name: str | None
    sent: int

    def advance(self, body: str) -> str:
        """The next piece of the arguments.

        Args:
            body: text behind the opening tag so far, without a closing tag.
        """

    def finish(self, body: str, call: Call) -> str | None:
        """The last piece.

        Args:
            body: text between the tags.
            call: that it is as a whole.

        Returns:
            None if the pieces do not join to the arguments of the call.
        """


@dataclass(slots=True)
class JsonPieces:
    """Arguments in the JSON form: the model's own text; line breaks in strings become escapes."""

    tools: Mapping[str, Tool]
    name: str | None = None
    sent: int = 0
    _begin: int = 0  # of the arguments
    _depth: int = 0  # of objects and lists
    _quoted: bool = False
    _escaped: bool = False
    _ended: bool = False  # the last brace comes next

    def advance(self, body: str) -> str:
        """See `PartialCall`."""
        if self.name is None:
            head = _HEAD.match(body)
            if head is None or head[1] not in self.tools:
                return ""
            self.name, self._begin, self.sent = head[1], head.end(), head.end()
        signs = []
        while self.sent < len(body) and not self._ended:
            sign = body[self.sent]
            self._take(sign)
            if not self._ended:
                signs.append(_CONTROL.get(sign, sign) if self._quoted else sign)
                self.sent += 1
        return "".join(signs)

    def finish(self, body: str, call: Call) -> str | None:
        """See `PartialCall`."""
        before = self.sent
        piece = self.advance(body)
        whole = body[self._begin : self.sent + 1]
        if self._ended and call.name == self.name and _same(whole, call.arguments):
            return piece + "}"
        self.sent = before
        return None

    def _take(self, sign: str) -> None:
        """Follow strings, and how deep they stand."""
        if self._quoted:
            self._quoted = self._escaped or sign != '"'
            self._escaped = sign == "\\" and not self._escaped
        elif sign == '"':
            self._quoted = True
        elif sign in "{[":
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1
            self._ended = self._depth == 0


@dataclass(frozen=True, slots=True)
class OpenValue:
    """A value whose end has not come.

    Attributes:
        key: of the argument, with what stands before the value.
        begin: of the value in the body.
        schema: of the value.
        is_text: it can only be a string, so that it is sent as it comes.
    """

    key: str
    begin: int
    schema: Any
    is_text: bool


@dataclass(slots=True)
class XmlPieces:
    """Arguments in the XML form: each value once its end is certain, strings as they come."""

    tools: Mapping[str, Tool]
    name: str | None = None
    sent: int = 0
    _json: str = ""  # all pieces
    _open: OpenValue | None = None

    def advance(self, body: str) -> str:
        """See `PartialCall`."""
        return self._advance(body, NEXT_VALUE)

    def finish(self, body: str, call: Call) -> str | None:
        """See `PartialCall`."""
        before = self.sent
        piece = self._advance(body, END_OF_VALUE) + "}"
        whole = self._open is None and call.name == self.name
        if whole and _same(self._json + "}", call.arguments):
            return piece
        self.sent = before
        return None

    def _advance(self, body: str, end_of_value: re.Pattern[str]) -> str:
        if self.name is None:
            head = FUNCTION.match(body)
            if head is None or head[1] not in self.tools or not PARAMETER.match(body, head.end()):
                return ""
            self.name, self.sent = head[1], head.end()
        before = len(self._json)
        while self._open is not None or self._begin_value(body):
            if not self._continue_value(body, end_of_value):
                break
        return self._json[before:]

    def _begin_value(self, body: str) -> bool:
        """Begin the parameter that stands next, if one does."""
        parameter = PARAMETER.match(body, self.sent)
        if parameter is None or self.name is None:
            return False
        tool = self.tools[self.name]
        schema = schema_of(parameter[1], tool.schema)
        key = f"{', ' if self._json else '{'}{write_json(parameter[1])}: "
        is_text = tool.types.of(schema) == {"string"}
        self._open = OpenValue(key, parameter.end(), schema, is_text)
        if is_text:
            self._json += key + '"'
            self.sent = parameter.end()
        return True

    def _continue_value(self, body: str, end_of_value: re.Pattern[str]) -> bool:
        """Take more of the open value; True if it has ended."""
        value = self._open
        if value is None or self.name is None:
            return False
        end = end_of_value.search(body, max(value.begin, self.sent))
        if value.is_text:
            self._json += self._text(body, value.begin, end.start() if end else None)
        if end is None:
            return False
        if value.is_text:
            self._json += '"'
        else:
            text = body[value.begin : end.start()].removeprefix("\n").removesuffix("\n")
            try:
                typed = typed_value(text, value.schema, self.tools[self.name].types)
                self._json += value.key + write_json(typed)
            except ValueError:  # no JSON can hold it: the call will be none
                return False
        self._open, self.sent = None, end.end()
        return True

    def _text(self, body: str, begin: int, end: int | None) -> str:
        """More of a string: all but what may belong to its closing tag, if that has not come."""
        if body[begin : begin + 1] == "\n":
            begin += 1
        begin = max(begin, self.sent)
        if end is None:
            end = body.find(CLOSE_VALUE, begin)
        if end < 0:
            end = len(body) - longest_overlap(body, (CLOSE_VALUE,))
        if body[end - 1 : end] == "\n":
            end -= 1
        if end <= begin:
            return ""
        self.sent = end
        return write_json(body[begin:end])[1:-1]


PIECES: Final = {"json": JsonPieces, "xml": XmlPieces}


def _same(one: str, other: str) -> bool:
    """Tell if two JSON texts have the same content."""
    try:
        return bool(read_json(one) == read_json(other))
    except ValueError:
        return False
