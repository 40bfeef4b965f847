"""Reasoning told apart from the answer: what a model writes between `<think>` and `</think>`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lowbit.runtime.text.stops import StopStrings
from lowbit.runtime.text.tokenizer import TextStream, Tokenizer

OPEN, CLOSE = "<think>", "</think>"

# How an output begins. raw: all of it is text; answer: a block may open with the first token;
# reasoning: the prompt has opened it.
Begin = Literal["raw", "answer", "reasoning"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an output, never empty."""

    text: str
    reasoning: bool


def begin_of(prompt: Sequence[int], tokenizer: Tokenizer) -> Begin:
    """How the answer to a prompt begins that a chat template made."""
    for id in reversed(prompt):
        if tokenizer.token_bytes(id).strip() or id in tokenizer.special_ids:
            return "reasoning" if id == tokenizer.token_id(OPEN) else "answer"
    return "answer"


@dataclass(slots=True)
class Splitter:
    """Turns tokens into pieces as they come; blank edges of both parts are left out.

    Stop strings end the answer, never the reasoning.
    """

    tokenizer: Tokenizer
    begin: Begin
    stops: tuple[str, ...] = ()
    _fresh: bool = True  # nothing has come yet
    _trim: bool = False  # blank text is left out until the part has begun
    _blank: str = ""  # blank end of the reasoning so far
    _thought: TextStream = field(init=False)
    _answer: TextStream = field(init=False)
    _stops: StopStrings = field(init=False)
    _reasoning: bool = field(init=False)
    _open: int | None = field(init=False)  # ids of the tags around the reasoning
    _close: int | None = field(init=False)

    def __post_init__(self) -> None:
        """Begin inside the reasoning or outside."""
        self._open, self._close = map(self.tokenizer.token_id, (OPEN, CLOSE))
        self._thought = TextStream(self.tokenizer)
        self._answer = TextStream(self.tokenizer)
        self._stops = StopStrings(self.stops)
        self._reasoning = self._trim = self.begin == "reasoning"

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the answer."""
        return self._stops.found

    @property
    def stopped(self) -> bool:
        """True once a stop string has occurred."""
        return self._stops.stopped

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
        return _piece(self._stops.push(self._trimmed(self._answer.push(id))), reasoning=False)

    def finish(self) -> Piece | None:
        """The text still held back."""
        if self._reasoning:
            return self._thinking(self._thought.finish())
        answer = self._stops.push(self._trimmed(self._answer.finish()))
        return _piece(answer + self._stops.finish(), reasoning=False)

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


def _piece(text: str, reasoning: bool) -> Piece | None:
    return Piece(text, reasoning) if text else None
