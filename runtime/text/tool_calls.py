"""The answer of a model that may call tools: reasoning, content and calls apart, as tokens come.

A call is given once its closing tag has come, so that what is not a complete call of a known tool
can still be given as content, and nothing that has been given is taken back.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from lowbit.runtime.text import json_calls, xml_calls
from lowbit.runtime.text.call import UNFINISHED, Call
from lowbit.runtime.text.reasoning import Begin, Piece, Splitter
from lowbit.runtime.text.stops import StopStrings, longest_overlap
from lowbit.runtime.text.tokenizer import Tokenizer
from lowbit.runtime.text.tools import CLOSE_CALL, OPEN_CALL, CallForm, Tool

MOST_FAILURES = 200  # texts between tags, in one answer, that are no calls
FORMS = {"json": json_calls, "xml": xml_calls}


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a call.

    Attributes:
        index: 0 for the first call of an answer.
        id: by which the tool's result refers to the call.
        name: of the function.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """Some text of a call's arguments; the fragments of a call join to a JSON object."""

    index: int
    fragment: str


Event = Piece | ToolCallStart | ToolArguments


def new_call_id() -> str:
    """A unique id for a call."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class AnswerSplitter:
    """Turns tokens into events as they come; joined, they do not depend on the tokens' borders.

    Blank text next to a call is left out at the edges of the content. Stop strings end the content,
    never the reasoning; text inside a call is no content.

    Attributes:
        tools: that may be called; without any, nothing is taken for a call.
        form: of calls.
        parallel: whether an answer may have several calls; else it ends with the first.
    """

    tokenizer: Tokenizer
    begin: Begin
    stops: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    form: CallForm | None = None
    parallel: bool = True
    new_id: Callable[[], str] = new_call_id
    _text: Splitter = field(init=False)
    _calls: "CallReader | None" = None
    _content: "Content" = field(init=False)
    _count: int = 0  # of calls
    _ended: bool = False  # by the only call of a request that is not parallel

    def __post_init__(self) -> None:
        """Parse calls if there are tools and a form."""
        self._content = Content(StopStrings(self.stops))
        if self.tools and self.form is not None and self.begin != "raw":
            self._calls = CallReader(self.form, {tool.name: tool for tool in self.tools})
        self._text = Splitter(self.tokenizer, self.begin, self.stops if not self._calls else ())

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the content."""
        return self._text.stop or self._content.stops.found

    @property
    def stopped(self) -> bool:
        """True once the answer has ended: a stop string, or the only call that is allowed."""
        return self.stop is not None or self._ended

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self._count

    def push(self, id: int) -> list[Event]:
        """The events that this token completes."""
        return list(self._events(self._text.push(id), final=False))

    def finish(self) -> list[Event]:
        """The events of the text still held back."""
        return list(self._events(self._text.finish(), final=True))

    def _events(self, piece: Piece | None, final: bool) -> Iterator[Event]:
        """Pass reasoning on, and look for calls in the rest."""
        if piece is not None and (piece.reasoning or self._calls is None):
            yield piece
        if self._calls is None:
            return
        text = piece.text if piece is not None and not piece.reasoning else ""
        for part in self._calls.read(text, final):
            if self.stopped:
                break
            if isinstance(part, Call):
                yield from _content(self._content.interrupt())
                yield from self._call(part)
            else:
                yield from _content(self._content.push(part))
        if final and not self._ended:
            yield from _content(self._content.finish())

    def _call(self, call: Call) -> Iterator[Event]:
        index, self._count = self._count, self._count + 1
        self._ended = not self.parallel
        yield ToolCallStart(index, self.new_id(), call.name)
        yield ToolArguments(index, call.arguments)


def _content(text: str) -> Iterator[Piece]:
    if text:
        yield Piece(text, reasoning=False)


@dataclass(slots=True)
class CallReader:
    """Finds calls in text that arrives in pieces.

    An opening tag that begins no call is text, and calls are looked for behind it again, until
    MOST_FAILURES texts between tags have been no calls: each takes time for the whole of it.
    """

    form: CallForm
    tools: Mapping[str, Tool]
    _held: str = ""  # text that is not certain; behind the opening tag while inside a call
    _inside: bool = False
    _searched: int = 0  # length of the held text that has no other closing tag
    _failures: int = 0

    def read(self, text: str, final: bool = False) -> Iterator[str | Call]:
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
                found = self._call(final)
                if found is None:
                    return
                yield found

    def _text_before_tag(self, final: bool) -> str:
        before, tag, after = self._held.partition(OPEN_CALL)
        if tag:
            self._held, self._inside, self._searched = after, True, 0
            return before
        certain = len(before) - (0 if final else longest_overlap(before, (OPEN_CALL,)))
        self._held = before[certain:]
        return before[:certain]

    def _call(self, final: bool) -> Call | str | None:
        """The call behind an opening tag, the tag if it begins none, or None for not yet."""
        form = FORMS[self.form]
        if not form.may_become_call(self._held, self.tools):
            return self._tag_as_text()
        while (at := self._held.find(CLOSE_CALL, self._searched)) >= 0:
            call = form.read_call(self._held[:at], self.tools)
            if isinstance(call, Call):
                self._held, self._inside = self._held[at + len(CLOSE_CALL) :], False
                return call
            self._failures += 1
            if call != UNFINISHED or self._failures >= MOST_FAILURES:
                return self._tag_as_text()
            self._searched = at + len(CLOSE_CALL)
        if final:
            return self._tag_as_text() if self._searched else self._all_as_text()
        self._searched = max(self._searched, len(self._held) - len(CLOSE_CALL) + 1)
        return None

    def _tag_as_text(self) -> str:
        self._inside = False
        return OPEN_CALL

    def _all_as_text(self) -> str:
        """All that is held, in which no call can be found any more."""
        text = OPEN_CALL + self._held if self._inside else self._held
        self._held, self._inside = "", False
        return text


@dataclass(slots=True)
class Content:
    """The content of an answer: cut at stop strings, without blank edges next to calls."""

    stops: StopStrings
    _blank: str = ""  # blank end of the content so far
    _begun: bool = False
    _called: bool = False

    def push(self, text: str) -> str:
        """The content that is certain once `text` has come."""
        return self._shown(self.stops.push(text))

    def interrupt(self) -> str:
        """The content held back before a call."""
        self._called = True
        return self._shown(self.stops.finish())

    def finish(self) -> str:
        """The content still held back."""
        shown = self._shown(self.stops.finish())
        blank, self._blank = self._blank, ""
        return shown if self._called else shown + blank

    def _shown(self, text: str) -> str:
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if self._called and not self._begun:
            shown = shown.lstrip()
        self._begun = self._begun or bool(shown)
        return shown
