"""Parts of messages: text, what a model of text cannot read, and what is skipped."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeGuard, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field

from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.explain import WRONG
from lowbit.runtime.serve.request.fields import TolerantBody
from lowbit.runtime.serve.settings import MOST_PARTS


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
    """An image, sound, video or file; refused in the newest message."""

    model_config = ConfigDict(extra="ignore")
    type: MediaType

    @property
    def kind(self) -> str:
        """Word for the part."""
        return self.type.removeprefix("input_").removesuffix("_url")


class SkippedPart(BaseModel):
    """A tool, an item or a part that this server cannot run; it is left out and named."""

    model_config = ConfigDict(extra="allow")
    type: str


def by_type(*known: str, default: str) -> Discriminator:
    """Discriminator that tags a value with its type, or `skipped` for one that is not known.

    Args:
        known: types with a schema of their own.
        default: tag of a value without a type.
    """

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if not isinstance(kind, str):
            return default
        return kind if kind in known else "skipped"

    return Discriminator(tag)


def named_types(*known: str) -> BeforeValidator:
    """Validator that refuses parts of other types by their type, not by the fields they lack."""

    def check(value: object) -> object:
        for part in value[:MOST_PARTS] if isinstance(value, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in known:
                names = ", ".join(f"`{name}`" for name in known)
                raise ValueError(f"type `{kind[:40]}` is not supported, only {names}")
        return value

    return BeforeValidator(check)


TextParts = Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_PARTS)]
AnyPart = Annotated[TextPart | MediaPart, Field(discriminator="type")]
AnyParts = Annotated[list[AnyPart], Field(fail_fast=True, max_length=MOST_PARTS)]
Text = Annotated[str | AnyParts, named_types("text", *MEDIA)]


def text_of(content: "str | Sequence[TextPart | MediaPart] | None") -> str:
    """Content of a message as one string."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined_text(part.text if isinstance(part, TextPart) else part for part in content)


def joined_text(parts: Iterable[str | MediaPart]) -> str:
    """Texts in a row; a line stands for what is none."""
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            text += ("\n" if text and not text.endswith("\n") else "") + f"[{part.kind} left out]\n"
    return text


def media_of(content: object) -> list[MediaPart]:
    """Parts of a message's content that are no text."""
    return [part for part in content if isinstance(part, MediaPart)] if _is_list(content) else []


def left_out_media(contents: Sequence[object], param: str) -> list[str]:
    """Names of the images and the like in messages.

    Args:
        contents: content of each message, the newest last.
        param: field that has the messages.

    Raises:
        ApiError: the newest message has one.
    """
    for part in media_of(contents[-1]) if contents else ():
        where = f"{param}[{len(contents) - 1}].content"
        raise invalid(
            f"`{where}`: type `{part.type}` is not supported in the newest message, only text",
            where,
            WRONG,
        )
    return [part.kind for content in contents for part in media_of(content)]


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)
