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

    def media(self) -> Iterator[tuple[str, MediaPart, bool]]:
        """Parts that are no text, with their places, and whether they are in a tool's result."""
        yield from _media(self.value, self.where, self.tool)

    def has_more(self) -> bool:
        """True if there is anything beside images and the like: text, or a tool's result."""
        parts = self.value if isinstance(self.value, list) else []
        return self.tool or any(
            not isinstance(part, MediaPart) and getattr(part, "text", "x").strip() for part in parts
        )


def _media(value: object, where: str, tool: bool) -> Iterator[tuple[str, MediaPart, bool]]:
    for index, part in enumerate(value if isinstance(value, list) else ()):
        place = f"{where}[{index}]"
        if isinstance(part, MediaPart):
            yield place, part, tool
        elif isinstance(inner := getattr(part, "content", None), list):
            yield from _media(inner, f"{place}.content", tool=True)


def images_of(contents: Sequence[Content]) -> Iterator[tuple[str, MediaPart]]:
    """Images that a model with a vision tower reads, with their places."""
    for content in contents:
        for where, part, _ in content.media():
            if part.kind == IMAGE and content.shows:
                yield where, part
