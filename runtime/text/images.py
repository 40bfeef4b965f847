"""Image parts of messages: from what a caller names to pictures, and what a template sees of them.

A part is `{"type": "image", "image": ...}`, with the bytes of a file, its path or a `data:` URL, or
`{"type": "image_url", "image_url": {"url": "data:..."}}`, as OpenAI's chats have it. Both may have
a `detail`: low, auto or high.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.formats.fields import shown
from lowbit.formats.files.user_file import read_user_file
from lowbit.runtime.images.data_url import MOST_BYTES, SCHEME, bytes_of_data_url, data_url
from lowbit.runtime.images.decode import decode_image
from lowbit.runtime.images.file import EncodedFile
from lowbit.runtime.images.picture import Picture, PictureReader

IMAGE, IMAGE_URL = "image", "image_url"
IMAGES = (IMAGE, IMAGE_URL)  # types of parts
FILE = "image"  # in messages about files
PLACEHOLDER = {"type": IMAGE}  # what a template gets
INSTEAD: Mapping[str, str] = {  # what to send in place of other kinds
    "video": "send frames of it as images",
    "file": "send its text, or its pages as images",
    "document": "send its text, or its pages as images",
    "audio": "send what is said as text",
}
ADDRESSES = (("http:",), ("https:",))  # first parts of web addresses that were taken for paths


def word_of(type: object) -> str:
    """Word for a type of part: `video` for `video_url`."""
    return str(type).removeprefix("input_").removesuffix("_url")


def image_parts(content: Any) -> list[Mapping[str, Any]]:
    """Image parts of a message's content."""
    parts = content if isinstance(content, list) else []
    return [each for each in parts if isinstance(each, Mapping) and each.get("type") in IMAGES]


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if a message has an image part."""
    return any(image_parts(each.get("content")) for each in messages if isinstance(each, Mapping))


def with_pictures(
    messages: Sequence[Mapping[str, Any]], reader: PictureReader
) -> list[Mapping[str, Any]]:
    """Messages whose image parts hold a `Picture`.

    Raises:
        RequestError, ResourceError: an image that cannot be read, by its message and part.
    """
    found = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not image_parts(message.get("content")):
            found.append(message)
            continue
        parts = [
            _read(part, reader, f"message {number}: part {place}") if image_parts([part]) else part
            for place, part in enumerate(message["content"], start=1)
        ]
        found.append({**message, "content": parts})
    return found


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[Picture]:
    """Pictures of messages, in the order in which a template writes them."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in image_parts(content):
            yield part[IMAGE]


def for_template(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A plain message with placeholders for its pictures.

    Args:
        where: the message, for errors.

    Raises:
        RequestError: an image that nobody has read.
    """
    if not isinstance(message["content"], list):
        return message
    parts = []
    for number, part in enumerate(message["content"], start=1):
        if part["type"] in IMAGES and not isinstance(part.get(IMAGE), Picture):
            kind = part["type"]
            raise RequestError(f"{where}: part {number} is '{kind}', only text is supported here")
        parts.append(PLACEHOLDER if part["type"] in IMAGES else part)
    return {**message, "content": parts}


def file_of(value: Any) -> bytes | EncodedFile:
    """An image file by its bytes, its path, or a `data:` URL.

    A text is never a path: it may come from somebody who may not read files.

    Raises:
        RequestError: it cannot be read, or is an address elsewhere.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value.lstrip()[: len(SCHEME)].lower() == SCHEME:
        return EncodedFile(value, bytes_of_data_url)
    if not isinstance(value, Path):
        raise RequestError(
            f"an image must be bytes, a path or a `{SCHEME}` URL, got {shown(value)}",
            hint="use pathlib.Path for a file",
        )
    return read_user_file(value, FILE, MOST_BYTES)


def read_image_file(path: Path) -> str:
    """The `data:` URL of an image file that a user named, which has been decoded once.

    Raises:
        RequestError, ResourceError: naming the file that is no image, damaged or too large.
    """
    if path.parts[:1] in ADDRESSES:
        raise RequestError(
            f"image `{path}` is an address, expected a file", hint="download it, and name the file"
        )
    try:
        content = read_user_file(path, FILE, MOST_BYTES)
        decode_image(content)
    except LowbitError as error:
        named = f"`{path}`" in str(error)
        words = str(error) if named else f"image `{path}`: {error}"
        raise type(error)(words, hint=error.hint) from None
    return data_url(content)


def question_of(text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    """Content of a message that shows images, as `data:` URLs, and asks about them."""
    if not images:
        return text
    parts = [{"type": IMAGE_URL, IMAGE_URL: {"url": each}} for each in images]
    return [*parts, {"type": "text", "text": text}]


def parts_of_question(content: Any) -> tuple[str, tuple[str, ...]] | None:
    """Text and images of what `question_of` made; None for anything else."""
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, list) or len(content) < 2:
        return None
    *shown, last = content
    urls = tuple(part[IMAGE_URL]["url"] for part in shown if _is_url(part))
    if len(urls) < len(shown) or not isinstance(last, dict) or last.get("type") != "text":
        return None
    text = last.get("text")
    return (text, urls) if isinstance(text, str) and question_of(text, urls) == content else None


def _is_url(part: Any) -> bool:
    address = part.get(IMAGE_URL) if isinstance(part, dict) else None
    return isinstance(address, dict) and isinstance(address.get("url"), str)


def _read(part: Mapping[str, Any], reader: PictureReader, where: str) -> dict[str, Any]:
    given = part.get(part["type"])
    if isinstance(given, Picture):
        return {"type": IMAGE, IMAGE: given}
    detail = part.get("detail")
    try:
        if part["type"] == IMAGE_URL:
            url = given.get("url") if isinstance(given, Mapping) else given
            detail = given.get("detail", detail) if isinstance(given, Mapping) else detail
            if not isinstance(url, str):
                raise RequestError(f"`{IMAGE_URL}` must have a `url`, got {shown(url)}")
            file: bytes | EncodedFile = EncodedFile(url, bytes_of_data_url)
        else:
            file = file_of(given)
        picture = reader.read(file, "auto" if detail is None else detail)
    except LowbitError as error:
        raise type(error)(f"{where}: {error}", hint=error.hint) from None
    return {"type": IMAGE, IMAGE: picture}
