"""Print an answer as it is made, for `generate` and `chat`."""

import os
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

import click
from rich.text import Text
from wcwidth import wcswidth

from lowbit.formats.printable import PROSE, printable
from lowbit.formats.shell.tables import messages
from lowbit.runtime.conversation.respond import showing

if TYPE_CHECKING:
    from lowbit.runtime.engine.stream import Generation, Stream
    from lowbit.runtime.text.answer import Piece

COLUMNS = 80  # of a terminal that does not know its width
TAB = 8  # columns between a terminal's tab stops
FENCES = ("```", "~~~")
HANGUL = range(0xAC00, 0xD7A4)  # its words end at spaces, unlike Han and kana
# Categories that no line begins with: closing punctuation, modifiers, marks, joiners.
NEVER_FIRST = frozenset({"Pe", "Pf", "Po", "Lm", "Mn", "Mc", "Me", "Cf"})
NEVER_LAST = frozenset({"Ps", "Pi"})


@dataclass(slots=True)
class Channel:
    """Text on its way to a terminal, which it must not drive, or to a file, unchanged."""

    write: Callable[[str], None]
    terminal: bool
    wrapper: "Wrapper | None" = None  # breaks lines at word ends; None leaves them to the terminal

    def push(self, text: str) -> None:
        """Print the next text, or as much of it as can be placed on its line."""
        if self.terminal:
            text = printable(text, keep=PROSE)
        self.write(text if self.wrapper is None else self.wrapper.push(text))

    def end(self) -> None:
        """Print the text held back."""
        if self.wrapper is not None:
            self.write(self.wrapper.finish())


@dataclass(slots=True)
class AnswerPrinter:
    """Prints the pieces of an answer: the answer on stdout, reasoning before it on stderr."""

    answer: Channel
    reasoning: Channel
    quiet: bool
    _thinking: bool = False

    def show(self, piece: "Piece") -> None:
        """Print a piece."""
        if self.quiet:
            return
        if piece.reasoning != self._thinking:
            self._turn(piece.reasoning, "thinking: " if piece.reasoning else "\n\n")
        (self.reasoning if piece.reasoning else self.answer).push(piece.text)

    def end(self) -> None:
        """Finish the line."""
        if self.quiet:
            return
        if self._thinking:
            self._turn(False, "\n")
        self.answer.end()
        click.echo()

    def _turn(self, reasoning: bool, mark: str) -> None:
        """Begin or end the reasoning."""
        self.reasoning.push(mark)
        self.reasoning.end()
        self._thinking = reasoning


def new_printer(quiet: bool, wrap: bool = False) -> AnswerPrinter:
    """A printer for one answer."""
    console = messages()

    def think(text: str) -> None:
        console.print(Text(text), style="dim italic", soft_wrap=True, end="")

    return AnswerPrinter(
        # Without `color`, click takes escape sequences out of what is piped.
        answer=_channel(sys.stdout, lambda text: click.echo(text, nl=False, color=True), wrap),
        reasoning=_channel(sys.stderr, think, wrap),
        quiet=quiet,
    )


def show(stream: "Stream", quiet: bool, wrap: bool = False) -> "Generation":
    """Print an answer as it comes; arguments as in `new_printer`."""
    printer = new_printer(quiet, wrap)
    with showing(stream, printer):
        for piece in stream.pieces:
            printer.show(piece)
    return stream.generation


def summary(generation: "Generation") -> str:
    """One line: tokens, speed, tokens a round, time to first token, reuse of the cache."""
    timings, count = generation.timings, len(generation.token_ids)
    speed, speculation = timings.decode_tokens_per_s, generation.speculation
    parts = [
        f"{count} token{'s' if count != 1 else ''}",
        *([f"{speed:.0f} tok/s"] if speed else []),
        *([speculation.words] if speculation is not None and speculation.rounds else []),
        f"first token {timings.first_token_s * 1e3:.0f} ms",
        f"prompt {timings.prompt_tokens} tokens"
        + (f" ({timings.reused_tokens} cached)" if timings.reused_tokens else ""),
        generation.finish_reason,
    ]
    return ", ".join(parts)


def _channel(stream: TextIO, write: Callable[[str], None], wrap: bool) -> Channel:
    """A channel to stdout or stderr; only terminals have their lines wrapped."""

    def width() -> int:
        try:
            return os.get_terminal_size(stream.fileno()).columns or COLUMNS
        except OSError:
            return COLUMNS

    terminal = stream.isatty()
    return Channel(write, terminal, Wrapper(width) if wrap and terminal else None)


@dataclass(slots=True)
class Wrapper:
    """Breaks lines at word ends; every word is held back until its end has come.

    Fenced code and lines of tables stay as they are. A word longer than a line is left to the
    terminal, so that it can be copied whole. At a break, the spaces become a line end.
    """

    width: Callable[[], int]  # columns of the terminal, asked at every line's start
    _limit: int = field(init=False)
    _column: int = 0
    _gap: str = ""  # spaces before the word
    _word: str = ""
    _begun: bool = False  # the beginning of a long word has been given out
    _fence: str = ""  # opened the code block in which the text is
    _first: str = ""  # beginning of the line's first word
    _parts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin a line."""
        self._limit = self.width()

    def push(self, text: str) -> str:
        """Take the next text, whose control characters are escaped; return the text to print."""
        for character in text:
            if character == "\n":
                self._end_line()
            elif character in " \t":
                self._end_word()
                self._gap += character
            else:
                if self._word and _may_break(self._word[-1], character):
                    self._end_word()
                self._word += character
                if len(self._word) > self._limit:
                    self._place()
                    self._begun = True
        return self._taken()

    def finish(self) -> str:
        """Return the text still held back."""
        self._end_word()
        self._parts.append(self._gap)
        self._gap = ""
        return self._taken()

    def _end_line(self) -> None:
        self._end_word()
        if self._column + self._gap_width() <= self._limit or self._verbatim():
            self._parts.append(self._gap)
        self._parts.append("\n")
        if self._fence:
            if self._first.startswith(self._fence):
                self._fence = ""
        elif self._first.startswith(FENCES):
            self._fence = self._first[:3]
        self._gap = self._first = ""
        self._column, self._limit = 0, self.width()

    def _end_word(self) -> None:
        self._place()
        self._begun = False

    def _place(self) -> None:
        """Give out the gap and the word, on a new line if this one has no room for them."""
        if not self._word:
            return
        self._first = self._first or self._word[:3]
        taken = max(0, wcswidth(self._word))
        gap = self._gap_width()
        full = self._column + gap + taken > self._limit
        if full and self._column and not self._begun and not self._verbatim():
            self._parts.append("\n" + self._word)
            self._limit = self.width()
            self._column = taken
        else:
            self._parts.append(self._gap + self._word)
            self._column += gap + taken
        if self._column > self._limit:  # the terminal has broken the line
            self._column = (self._column - 1) % self._limit + 1
        self._gap = self._word = ""

    def _verbatim(self) -> bool:
        return bool(self._fence) or self._first.startswith((*FENCES, "|"))

    def _gap_width(self) -> int:
        column = self._column
        for character in self._gap:
            column += TAB - column % TAB if character == "\t" else 1
        return column - self._column

    def _taken(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        return text


def _may_break(before: str, after: str) -> bool:
    """True if a line may end between two characters without a space."""
    if unicodedata.category(after) in NEVER_FIRST or unicodedata.category(before) in NEVER_LAST:
        return False
    return _ideographic(before) or _ideographic(after)


def _ideographic(character: str) -> bool:
    """A wide letter or mark of Chinese or Japanese; emoji are none."""
    if character.isascii() or ord(character) in HANGUL:
        return False
    wide = unicodedata.east_asian_width(character) in "WF"
    return wide and unicodedata.category(character)[0] in "LP"
