"""Stop strings in text that arrives in pieces."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class StopStrings:
    """Cuts a text before the first stop string, wherever the text is split.

    The first stop string is the one that is complete first, so a split cannot change the cut.

    Attributes:
        stops: strings that end the text and are not part of it.
        found: the one that has ended it; None as long as none has.
    """

    stops: tuple[str, ...] = ()
    found: str | None = None
    _held: str = ""  # end of the text, with which a stop string may begin

    @property
    def stopped(self) -> bool:
        """True once a stop string has occurred."""
        return self.found is not None

    def push(self, text: str) -> str:
        """The text that is certain once `text` has come."""
        if self.stopped:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            end, at = min(ends)
            self.found, self._held = text[at:end], ""
            return text[:at]
        certain = len(text) - longest_overlap(text, self.stops)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The text still held back."""
        held, self._held = self._held, ""
        return held


def longest_overlap(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of a text that is a proper beginning of one of the marks."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
