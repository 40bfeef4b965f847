"""Parts of messages: texts, images and the like, and what chat templates get of them."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PrivateAttr

from lowbit.formats.errors import RequestError
from lowbit.runtime.images.picture import Picture
from lowbit.runtime.serve.request.body import TolerantBody
from lowbit.runtime.serve.request.explain import MOST_SHOWN, ItemError
from lowbit.runtime.serve.settings import MOST_PARTS
from lowbit.runtime.text.images import word_of


class TextPart(TolerantBody):
    """A part of a message; a model of text reads no other."""

    type: Literal["text"]
    text: str


# Types of parts that a model of text cannot read; a line of text stands for an earlier one.
MediaType = Literal[
    "image",
    "image_url",
    "input_image",
    "audio",
    "input_audio",
    "video",
    "video_url",
    "file",
    "input_file",
    "document",
]
MEDIA: tuple[str, ...] = get_args(MediaType)


class MediaPart(BaseModel):
    """An image, sound, video or file; a line of text stands for what the model cannot read."""

    model_config = ConfigDict(extra="ignore")
    type: MediaType
    # Places of an image: OpenAI's address, or an object of it; the same under Qwen's name; a stored
    # file; Anthropic's source; base64 itself, as tools of MCP have it.
    image_url: Any = Field(default=None, exclude=True)
    image: Any = Field(default=None, exclude=True)
    file_id: Any = Field(default=None, exclude=True)
    source: Any = Field(default=None, exclude=True)
    data: Any = Field(default=None, exclude=True)
    detail: Any = Field(default=None, exclude=True)
    _picture: Picture | None = PrivateAttr(default=None)
    _fetched: bytes | RequestError | None = PrivateAttr(default=None)
    _reason: str = PrivateAttr(default="")

    @property
    def address(self) -> Any:
        """The address, or the object of it, that it names an image by; None if it names none."""
        return self.image if self.image_url is None else self.image_url

    @property
    def kind(self) -> str:
        """Word for the part."""
        return word_of(self.type)

    @property
    def picture(self) -> Picture | None:
        """The image, once it has been read; None for a part that the prompt lacks."""
        return self._picture

    @property
    def fetched(self) -> bytes | RequestError | None:
        """The file at the address that the part names, or why it has not come; None before."""
        return self._fetched

    @fetched.setter
    def fetched(self, content: bytes | RequestError) -> None:
        self._fetched = content

    def read_as(self, picture: Picture | None, reason: str = "") -> None:
        """Take the image that the part is, or why it is left out, for what it was sent as.

        A body is kept as long as its answer; it need not keep base64 as well.
        """
        self._picture, self._reason, self._fetched = picture, reason, None
        self.image_url = self.image = self.source = self.data = None

    @property
    def line(self) -> str:
        """The line of text that stands for the part where the prompt lacks it."""
        return line_of(self.kind, self._reason)


class SkippedPart(BaseModel):
    """A tool, an item or a part that this server cannot run; it is left out and named."""

    model_config = ConfigDict(extra="allow")
    type: str


def by_type(*known: str, default: str, media: bool = False) -> Discriminator:
    """Discriminator that tags a value with its type, or `skipped` for one that is not known.

    Args:
        known: types with a schema of their own.
        default: tag of a value without a type.
        media: tag those of a `MediaPart` as `media`.
    """

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if not isinstance(kind, str):
            return default
        if media and kind in MEDIA:
            return "media"
        return kind if kind in known else "skipped"

    return Discriminator(tag)


def named_types(*known: str) -> BeforeValidator:
    """Validator that refuses parts of other types by their type, not by the fields they lack."""

    def check(value: object) -> object:
        for index, part in enumerate(value[:MOST_PARTS] if isinstance(value, list) else []):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in known:
                names = ", ".join(f"`{name}`" for name in known)
                words = f"type `{kind[:MOST_SHOWN]}` is not supported, only {names}"
                raise ItemError(words, index)
        return value

    return BeforeValidator(check)


def refusals_as_text(value: object) -> object:
    """Parts of an earlier turn in which the model refused, as its text."""
    if not isinstance(value, list):
        return value
    return [
        {"type": "text", "text": part.get("refusal")}
        if isinstance(part, dict) and part.get("type") == "refusal"
        else part
        for part in value
    ]


def documents_as_text(value: object) -> object:
    """Documents whose text the client sends, and results of searches, as that text.

    Both are Anthropic's; a document may have a title, and parts of its own in place of one text.
    """
    if not isinstance(value, list):
        return value
    return [part if (text := _document(part)) is None else text for part in value]


def _document(part: object) -> dict[str, str] | None:
    """The text part for a document or result; None for any other part."""
    if not isinstance(part, dict) or part.get("type") not in ("document", "search_result"):
        return None
    source = part.get("source")
    if part["type"] == "search_result":
        head, content = [part.get("title"), source], part.get("content")
    elif isinstance(source, dict) and source.get("type") in ("text", "content"):
        head, content = [part.get("title"), part.get("context")], source.get("data")
        content = source.get("content") if content is None else content
    else:
        return None
    inner = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [each.get("text") if isinstance(each, dict) else None for each in inner]
    if not all(isinstance(text, str) for text in texts):
        return None
    lines = [*(text for text in head if isinstance(text, str) and text), *texts]
    return {"type": "text", "text": "\n".join(map(str, lines)) + "\n"}


TextParts = Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_PARTS)]
AnyPart = Annotated[TextPart | MediaPart, Field(discriminator="type")]
AnyParts = Annotated[list[AnyPart], Field(fail_fast=True, max_length=MOST_PARTS)]
Text = Annotated[str | AnyParts, named_types("text", *MEDIA)]


def line_of(kind: str, reason: str = "") -> str:
    """The line of text that stands for a part of a kind; the same in every turn, for the cache."""
    return f"[{kind} left out: {reason}]" if reason else f"[{kind} left out]"


Turned = str | list[dict[str, Any]]  # content as chat templates have it


def text_of(content: "str | Sequence[TextPart | MediaPart] | None") -> Turned:
    """Content of a message as one string, or as parts where it has images."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined_parts(part.text if isinstance(part, TextPart) else part for part in content)


def joined_parts(parts: Iterable[str | MediaPart]) -> Turned:
    """Texts and images in a row; a line stands for what is neither."""
    found: list[dict[str, Any]] = []
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
        elif part.picture is None:
            text += ("\n" if text and not text.endswith("\n") else "") + f"{part.line}\n"
        else:
            found += [{"type": "text", "text": text}] if text else []
            found.append({"type": "image", "image": part.picture})
            text = ""
    if not found:
        return text
    return [*found, {"type": "text", "text": text}] if text else found
