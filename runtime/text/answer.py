"""The text of an answer as its tokens come: reasoning, content and calls of tools apart.

A call is given once its closing tag has come, so that what is not a complete call of a known tool
can still be given as content, and nothing that has been given is taken back.

A stream may have calls as they are written: then a call is begun once its beginning is certain, and
its arguments come in pieces. They join to valid JSON exactly if the call is complete and would have
been given as a whole. Where a begun call turns out to be none, what has been given stays, its JSON
never ends, and the text from there on is content, in which calls are looked for again.
"""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from lowbit.runtime.text.calls import Call
from lowbit.runtime.text.tokenizer import TextStream, Tokenizer
from lowbit.runtime.text.tool_calls import CallBegin, CallPiece, CallReader, longest_overlap
from lowbit.runtime.text.tools import CallForm, Tool

OPEN, CLOSE = "<think>", "</think>"

# Start of an output. raw: all of it is text; answer: a block of reasoning may open with the first
# token; reasoning: the prompt has opened it. Where the prompt has some of the text, too, nothing at
# the beginning of the output is left out. rest: of an answer, without reasoning; rest of reasoning:
# of an open block.
OutputStart = Literal["raw", "answer", "reasoning", "rest", "rest of reasoning"]
THINKING_STARTS = ("reasoning", "rest of reasoning")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an output, never empty."""

    text: str
    reasoning: bool


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a call."""

    index: int  # 0 for the first call of an answer
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """Some text of a call's arguments; the fragments of a complete call join to a JSON object."""

    index: int
    fragment: str
    last: bool = False  # the call is complete


Event = Piece | ToolCallStart | ToolArguments


def new_call_id() -> str:
    """A unique id for a call."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class Splitter:
    """Turns tokens into pieces as they come; blank edges of both parts are left out."""

    tokenizer: Tokenizer
    begin: OutputStart
    _fresh: bool = True  # nothing has come yet
    _trim: bool = False  # blank text is left out until the part has begun
    _blank: str = ""  # blank end of the reasoning so far
    _thought: TextStream = field(init=False)
    _answer: TextStream = field(init=False)
    _reasoning: bool = field(init=False)
    _open: int | None = field(init=False)  # ids of the tags around the reasoning
    _close: int | None = field(init=False)

    def __post_init__(self) -> None:
        """Begin inside the reasoning or outside."""
        self._open, self._close = map(self.tokenizer.token_id, (OPEN, CLOSE))
        self._thought = TextStream(self.tokenizer)
        self._answer = TextStream(self.tokenizer)
        self._reasoning = self.begin in THINKING_STARTS
        self._trim = self.begin == "reasoning"

    def push(self, id: int) -> Piece | None:
        """The text that this token completes."""
        fresh, self._fresh = self._fresh, False
        if self._reasoning and id == self._close:
            piece = self._thinking(self._thought.finish())
            self._reasoning, self._trim = False, True
            return piece
        if fresh and self.begin == "answer" and id == self._open:
            self._reasoning = self._trim = True
            return None
        if self._reasoning:
            return self._thinking(self._thought.push(id))
        return _piece(self._trimmed(self._answer.push(id)), reasoning=False)

    def finish(self) -> Piece | None:
        """The text still held back."""
        if self._reasoning:
            return self._thinking(self._thought.finish())
        return _piece(self._trimmed(self._answer.finish()), reasoning=False)

    def _thinking(self, text: str) -> Piece | None:
        text = self._blank + self._trimmed(text)
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        return _piece(shown, reasoning=True)

    def _trimmed(self, text: str) -> str:
        """The text without the blank beginning of its part."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


@dataclass(slots=True)
class Content:
    """The content of an answer, cut before the first stop string, wherever the text is split.

    The first stop string is the one that is complete first, so a split cannot change the cut.
    """

    stops: tuple[str, ...] = ()
    # Blank edges next to calls are left out, so that blank text waits for what follows
    beside_calls: bool = False
    found: str | None = None  # the stop string that has ended it; None as long as none has
    _held: str = ""  # end of the text, with which a stop string may begin
    _blank: str = ""  # blank end of the content so far
    _begun: bool = False
    _called: bool = False

    def push(self, text: str) -> str:
        """The content that is certain once `text` has come."""
        if not self.stops:
            return self._shown(text)
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            end, at = min(ends)
            self.found, self._held = text[at:end], ""
            return self._shown(text[:at])
        certain = len(text) - longest_overlap(text, self.stops)
        self._held = text[certain:]
        return self._shown(text[:certain])

    def interrupt(self) -> str:
        """The content held back before a call."""
        self._called = True
        return self._flush()

    def finish(self) -> str:
        """The content still held back."""
        shown = self._flush()
        blank, self._blank = self._blank, ""
        return shown if self._called else shown + blank

    def _flush(self) -> str:
        held, self._held = self._held, ""
        return self._shown(held)

    def _shown(self, text: str) -> str:
        if not self.beside_calls:
            return text
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if self._called and not self._begun:
            shown = shown.lstrip()
        self._begun = self._begun or bool(shown)
        return shown


@dataclass(slots=True)
class AnswerSplitter:
    """Turns tokens into events as they come; joined, they do not depend on the tokens' borders.

    Blank text next to a call is left out at the edges of the content. Stop strings end the content,
    never the reasoning; text inside a call is no content.
    """

    tokenizer: Tokenizer
    begin: OutputStart
    stops: tuple[str, ...] = ()
    # Tools that may be called; without any, nothing is taken for a call
    tools: tuple[Tool, ...] = ()
    form: CallForm | None = None
    parallel: bool = True  # an answer may have several calls; else it ends with the first
    in_pieces: bool = False  # calls are begun before they are complete
    cut_calls: bool = False  # a call that the end of the answer cuts off is begun, too
    new_id: Callable[[], str] = new_call_id
    _text: Splitter = field(init=False)
    _calls: CallReader | None = None
    _content: Content = field(init=False)
    _begun: int = 0  # calls
    _complete: int = 0  # calls
    _ended: bool = False  # by the only call of a request that is not parallel

    def __post_init__(self) -> None:
        """Parse calls if there are tools and a form."""
        if self.tools and self.form is not None and self.begin != "raw":
            tools = {tool.name: tool for tool in self.tools}
            self._calls = CallReader(self.form, tools, self.in_pieces, self.cut_calls)
        self._content = Content(self.stops, beside_calls=self._calls is not None)
        self._text = Splitter(self.tokenizer, self.begin)

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the content."""
        return self._content.found

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
        piece = self._text.push(id)
        if self._calls is None and not self.stops:  # most answers: nothing is looked for in them
            return [] if piece is None else [piece]
        return list(self._events(piece, final=False))

    def finish(self) -> list[Event]:
        """The events of the text still held back."""
        return list(self._events(self._text.finish(), final=True))

    def _events(self, piece: Piece | None, final: bool) -> Iterator[Event]:
        """Pass reasoning on, and look for calls in the rest."""
        if piece is not None and piece.reasoning:
            yield piece
        text = piece.text if piece is not None and not piece.reasoning else ""
        if self._calls is None:
            text = self._content.push(text)
            yield from _content(text + self._content.finish() if final else text)
            return
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


def _content(text: str) -> Iterator[Piece]:
    if text:
        yield Piece(text, reasoning=False)


def _piece(text: str, reasoning: bool) -> Piece | None:
    return Piece(text, reasoning) if text else None
