"""Wrap text at word ends as it comes."""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

from wcwidth import wcswidth

TAB = 8  # columns between a terminal's tab stops
FENCES = ("```", "~~~")
HANGUL = range(0xAC00, 0xD7A4)  # its words end at spaces, unlike Han and kana
# Categories that no line begins with: closing punctuation, modifiers, marks, joiners.
NEVER_FIRST = frozenset({"Pe", "Pf", "Po", "Lm", "Mn", "Mc", "Me", "Cf"})
NEVER_LAST = frozenset({"Ps", "Pi"})


@dataclass(slots=True)
class Wrapper:
    """Breaks lines at word ends; every word is held back until its end has come.

    Fenced code and lines of tables stay as they are. A word longer than a line is left to the
    terminal, so that it can be copied whole. At a break, the spaces become a line end.

    Attributes:
        width: columns of the terminal, asked at every line's start.
    """

    width: Callable[[], int]
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
    """Tell if a line may end between two characters that no space parts."""
    if unicodedata.category(after) in NEVER_FIRST or unicodedata.category(before) in NEVER_LAST:
        return False
    return _ideographic(before) or _ideographic(after)


def _ideographic(character: str) -> bool:
    """A wide letter or mark of Chinese or Japanese; emoji are none."""
    if character.isascii() or ord(character) in HANGUL:
        return False
    wide = unicodedata.east_asian_width(character) in "WF"
    return wide and unicodedata.category(character)[0] in "LP"
