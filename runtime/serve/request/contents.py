"""Contents of messages that may hold images, the same for every API."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowbit.runtime.serve.request.parts import MediaPart

IMAGE = "image"  # kind of a part


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a message as its API has it."""

    value: object
    where: str  # such as `messages[0].content`
    shows: bool = True  # a user or a tool says it: an image may be part of it
    tool: bool = False  # a tool has made it, not a person

    def has_more(self) -> bool:
        """True if there is anything beside images and the like: text, or a tool's result."""
        parts = self.value if isinstance(self.value, list) else []
        return self.tool or any(
            not isinstance(part, MediaPart) and _text_of(part, other="x").strip() for part in parts
        )

    def speaks(self) -> bool:
        """True if a person says or shows anything in it, beside results of tools."""
        parts = self.value if isinstance(self.value, list) else [self.value]
        return (
            self.shows
            and not self.tool
            and any(isinstance(part, MediaPart) or _text_of(part).strip() for part in parts)
        )


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPart:
    """A part that is no text."""

    part: MediaPart
    where: str  # such as `messages[0].content[1]`
    content: Content  # that it is part of
    tool: bool  # it is in a tool's result
    newest: bool  # it is of the newest turn

    @property
    def shows(self) -> bool:
        """True for an image that a model with a vision tower reads."""
        return self.part.kind == IMAGE and self.content.shows


def media_of(contents: Sequence[Content]) -> list[PlacedPart]:
    """Parts that are no text, in their order.

    The newest turn is the last message of a user or tool, and the results of tools before it up to
    the last message of the model, or of a person who says something. Words of a person answer the
    results before them, those of the same message too.
    """
    last = max((number for number, each in enumerate(contents) if each.shows), default=-1)
    results = last + 1  # first message whose results nobody has answered
    while results > 0 and (before := contents[results - 1]).shows and not before.speaks():
        results -= 1
    return [
        PlacedPart(part, where, content, tool, number >= results if tool else number == last)
        for number, content in enumerate(contents)
        for where, part, tool in _media(content.value, content.where, content.tool)
    ]


def _media(value: object, where: str, tool: bool) -> Iterator[tuple[str, MediaPart, bool]]:
    for index, part in enumerate(value if isinstance(value, list) else ()):
        place = f"{where}[{index}]"
        if isinstance(part, MediaPart):
            yield place, part, tool
        elif isinstance(inner := getattr(part, "content", None), list):
            yield from _media(inner, f"{place}.content", tool=True)


def _text_of(part: object, other: str = "") -> str:
    """Text of a part; `other` for one that is none."""
    text = part if isinstance(part, str) else getattr(part, "text", None)
    return text if isinstance(text, str) else other
