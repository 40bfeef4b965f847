"""The answer of a model that may call tools: reasoning, content and calls apart, as tokens come.

A call is given once its closing tag has come, so that what is not a complete call of a known tool
can still be given as content, and nothing that has been given is taken back.

A stream may have calls as they are written: then a call is begun once its beginning is certain, and
its arguments come in pieces. They join to valid JSON exactly if the call is complete and would have
been given as a whole. Where a begun call turns out to be none, what has been given stays, its JSON
never ends, and the text from there on is content, in which calls are looked for again.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from lowbit.runtime.text import json_calls, xml_calls
from lowbit.runtime.text.call import UNFINISHED, Call, CallBegin, CallPiece
from lowbit.runtime.text.partial_calls import PIECES, PartialCall
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
    """Some text of a call's arguments; the fragments of a complete call join to a JSON object.

    Attributes:
        index: of the call.
        fragment: text.
        last: the call is complete.
    """

    index: int
    fragment: str
    last: bool = False


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
        in_pieces: calls are begun before they are complete.
    """

    tokenizer: Tokenizer
    begin: Begin
    stops: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    form: CallForm | None = None
    parallel: bool = True
    in_pieces: bool = False
    new_id: Callable[[], str] = new_call_id
    _text: Splitter = field(init=False)
    _calls: "CallReader | None" = None
    _content: "Content" = field(init=False)
    _begun: int = 0  # calls
    _complete: int = 0  # calls
    _ended: bool = False  # by the only call of a request that is not parallel

    def __post_init__(self) -> None:
        """Parse calls if there are tools and a form."""
        self._content = Content(StopStrings(self.stops))
        if self.tools and self.form is not None and self.begin != "raw":
            tools = {tool.name: tool for tool in self.tools}
            self._calls = CallReader(self.form, tools, self.in_pieces)
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
        """Number of complete calls so far."""
        return self._complete

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
            match part:
                case str():
                    yield from _content(self._content.push(part))
                case Call():
                    yield from self._begin(part.name)
                    yield from self._continue(part.arguments, last=True)
                case CallBegin():
                    yield from self._begin(part.name)
                case CallPiece():
                    yield from self._continue(part.text, part.last)
        if final and not self._ended:
            yield from _content(self._content.finish())

    def _begin(self, name: str) -> Iterator[Event]:
        yield from _content(self._content.interrupt())
        index, self._begun = self._begun, self._begun + 1
        yield ToolCallStart(index, self.new_id(), name)

    def _continue(self, piece: str, last: bool) -> Iterator[Event]:
        if last:
            self._complete += 1
            self._ended = not self.parallel
        yield ToolArguments(self._begun - 1, piece, last)


Part = str | Call | CallBegin | CallPiece


def _content(text: str) -> Iterator[Piece]:
    if text:
        yield Piece(text, reasoning=False)


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
    in_pieces: bool = False
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
                if found is None:
                    return
                yield found

    def _text_before_tag(self, final: bool) -> str:
        before, tag, _ = self._held.partition(OPEN_CALL)
        if tag:
            text, self._tag = self._take(len(before)), self._take(len(tag))
            self._inside, self._searched = True, 0
            self._partial = PIECES[self.form](self.tools) if self.in_pieces else None
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

    def _call(self, final: bool) -> Part | None:
        """The call behind an opening tag or its end, text if it is none, or None for not yet."""
        form = FORMS[self.form]
        if not form.may_become_call(self._held, self.tools):
            return self._tag_as_text()
        while (at := self._held.find(CLOSE_CALL, self._searched)) >= 0:
            call = form.read_call(self._held[:at], self.tools)
            if isinstance(call, Call):
                return self._complete(call, at)
            self._failures += 1
            if call != UNFINISHED or self._failures >= MOST_FAILURES:
                return self._tag_as_text()
            self._searched = at + len(CLOSE_CALL)
        if final:
            return self._tag_as_text() if self._searched else self._all_as_text()
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
