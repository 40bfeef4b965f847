"""A text some of whose places are plain text although a tokenizer has a token for them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text with a mark inside each place that spells an added token and is none.

    Attributes:
        text: with the mark behind the first character of such a place.
        mark: one character, which is no part of the text; empty where nothing is marked.
    """

    text: str
    mark: str = ""

    @property
    def plain(self) -> str:
        """The text without marks."""
        return self.text.replace(self.mark, "") if self.mark else self.text
