"""Calls of tools found in text that arrives in pieces, whole or while they are written.

A call in pieces is begun once its beginning is certain: `{"name": "f", "arguments": {` of a known
tool, or `<function=f><parameter=x>`. The last brace is left to `finish`, which compares the pieces
with the whole call: they join to valid JSON only if that is a call, and the same.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lowbit.runtime.text.calls import (
    CLOSE_VALUE,
    END_OF_VALUE,
    FUNCTION,
    NEXT_VALUE,
    PARAMETER,
    UNFINISHED,
    Call,
    may_become_call,
    read_call,
)
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

MOST_FAILURES = 200  # texts between tags, in one answer, that are no calls
_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*"({NAME.pattern})"\s*,\s*"arguments"\s*:\s*(?=\{{)')
_CONTROL: Final = {chr(code): write_json(chr(code))[1:-1] for code in range(32)}


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call that is certain to be meant, before its arguments are complete."""

    name: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Some text of the arguments of a begun call."""

    text: str
    # The call is complete. A begun call is broken where text or another call follows without it
    last: bool = False


Part = str | Call | CallBegin | CallPiece


class PartialCall(Protocol):
    """A call that is being written."""

    name: str | None  # name of the function; None as long as the beginning is not certain
    sent: int  # characters of the body that the pieces so far stand for

    def advance(self, body: str) -> str:
        """The next piece of the arguments.

        Args:
            body: text behind the opening tag so far, without a closing tag.
        """

    def finish(self, body: str, call: Call) -> str | None:
        """The last piece.

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
    """A value whose end has not come."""

    key: str  # name of the argument, with what stands before the value
    begin: int  # start of the value in the body
    schema: Any
    is_text: bool  # it can only be a string, so that it is sent as it comes


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
        self._json = self._json or "{"  # also of a call that is cut before its first value
        while self._open is not None or self._begin_value(body):
            if not self._continue_value(body, end_of_value):
                break
        return self._json[before:]

    def _begin_value(self, body: str) -> bool:
        parameter = PARAMETER.match(body, self.sent)
        if parameter is None or self.name is None:
            return False
        tool = self.tools[self.name]
        schema = schema_of(parameter[1], tool.schema)
        key = f"{', ' if len(self._json) > 1 else ''}{write_json(parameter[1])}: "
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


@dataclass(slots=True)
class CallReader:
    """Finds calls in text that arrives in pieces.

    An opening tag that begins no call is text, and calls are looked for behind it again, until
    MOST_FAILURES texts between tags have been no calls: each takes time for the whole of it.

    So that a stream has the calls of the whole answer, calls are looked for in a begun call that
    breaks, too, and one whose pieces turn out to be another call is given once more as a whole.
    """

    form: CallForm
    tools: Mapping[str, Tool]
    in_pieces: bool = False  # calls are begun before they are complete
    # A call that the end cuts off is begun, too; else it is text without `in_pieces`
    cut_calls: bool = False
    _partial: PartialCall | None = None  # the call that may be begun
    _held: str = ""  # text that is not certain; behind the opening tag while inside a call
    _given: int = 0  # length of the held text that a broken call has given
    _tag: str = ""  # the opening tag of what may be a call, as far as it is not given
    _inside: bool = False
    _behind: bool = False  # behind a call, or blank text behind one
    _searched: int = 0  # length of the held text that has no other closing tag
    _failures: int = 0

    def read(self, text: str, final: bool = False) -> Iterator[Part]:
        """Text and calls that are certain once `text` has come; all of it if it is the end."""
        self._held += text
        while self._held or self._inside:
            if self._failures >= MOST_FAILURES:
                yield self._all_as_text()
            elif not self._inside:
                yield self._text_before_tag(final)
                if not self._inside:
                    return
            else:
                yield from self._pieces()
                found = self._call(final)
                if found is None and final:
                    yield from self._cut()
                elif found is None:
                    return
                else:
                    yield found

    def _text_before_tag(self, final: bool) -> str:
        before, tag, _ = self._held.partition(OPEN_CALL)
        if tag:
            text, self._tag = self._take(len(before)), self._take(len(tag))
            self._inside, self._searched = True, 0
            self._behind = self._behind and not text.strip()
            self._partial = self._new_partial() if self.in_pieces else None
            return text
        if final and self._behind and OPEN_CALL.startswith(before.strip()):
            self._held = ""  # another call, cut within its tag
            return ""
        text = self._take(len(before) - (0 if final else longest_overlap(before, (OPEN_CALL,))))
        self._behind = self._behind and not text.strip()
        return text

    def _take(self, length: int) -> str:
        """The beginning of the held text, which ends here, without what has been given of it."""
        text, self._held = self._held[self._given : length], self._held[length:]
        self._given = max(0, self._given - length)
        return text

    def _pieces(self) -> Iterator[Part]:
        """Parts of a call that are certain before its closing tag."""
        partial = self._partial
        if partial is None:
            return
        body = self._held.partition(CLOSE_CALL)[0]
        body = body[: len(body) - longest_overlap(body, (CLOSE_CALL,))]
        begun = partial.name is not None
        piece = partial.advance(body)
        if partial.name is not None and not begun:
            yield CallBegin(partial.name)
        if piece:
            yield CallPiece(piece)

    def _new_partial(self) -> PartialCall:
        partial: PartialCall = PIECES[self.form](self.tools)
        return partial

    def _cut(self) -> Iterator[Part]:
        """Text held back when the answer ends inside a call: that call's beginning, or text."""
        partial = self._partial
        if self.cut_calls:
            partial = self._partial = partial or self._new_partial()
            begun = partial.name is not None
            piece = partial.advance(
                self._held[: -longest_overlap(self._held, (CLOSE_CALL,)) or None]
            )
            if partial.name is not None:
                yield from () if begun else (CallBegin(partial.name),)
                yield CallPiece(piece)
                self._held, self._given, self._inside = "", 0, False
                return
            if self._behind and OPEN_CALL not in self._held and CLOSE_CALL not in self._held:
                self._held, self._inside = "", False  # another call, cut before its name
                return
        yield self._tag_as_text() if self._searched else self._all_as_text()

    def _call(self, final: bool) -> Part | None:
        """The call behind an opening tag or its end, text if it is none, or None without an end."""
        if not may_become_call(self.form, self._held, self.tools):
            return self._tag_as_text()
        while (at := self._held.find(CLOSE_CALL, self._searched)) >= 0:
            call = read_call(self.form, self._held[:at], self.tools)
            if isinstance(call, Call):
                return self._complete(call, at)
            self._failures += 1
            if call != UNFINISHED or self._failures >= MOST_FAILURES:
                return self._tag_as_text()
            self._searched = at + len(CLOSE_CALL)
        if not final:
            self._searched = max(self._searched, len(self._held) - len(CLOSE_CALL) + 1)
        return None

    def _complete(self, call: Call, end: int) -> Part:
        """A call that ends at `end`, or what has not been given of it."""
        found: Part = call
        if self._partial is not None and self._partial.name is not None:
            piece = self._partial.finish(self._held[:end], call)
            if piece is not None:
                found = CallPiece(piece, last=True)
        self._take(end + len(CLOSE_CALL))
        self._inside, self._behind = False, True
        return found

    def _tag_as_text(self) -> str:
        """The tag of what is no call; of a begun call, nothing, and what is left becomes text."""
        self._inside = self._behind = False
        if self._partial is None or self._partial.name is None:
            return self._tag
        self._given = max(self._given, self._partial.sent)
        return ""

    def _all_as_text(self) -> str:
        """All that is held, in which no call can be found any more."""
        tag = self._tag_as_text() if self._inside else ""
        return tag + self._take(len(self._held))


def _same(one: str, other: str) -> bool:
    try:
        return bool(read_json(one) == read_json(other))
    except ValueError:
        return False


def longest_overlap(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of a text that is a proper beginning of one of the marks."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
