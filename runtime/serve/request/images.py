"""Images of a request: read before its prompt is made, or named where the model takes none."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.formats.errors import RequestError
from lowbit.formats.fields import shown
from lowbit.runtime.engine.prompts import PromptEncoder
from lowbit.runtime.images.data_url import bytes_of_base64, bytes_of_data_url
from lowbit.runtime.images.decode import UnreadableImageError
from lowbit.runtime.images.file import EncodedFile
from lowbit.runtime.images.picture import (
    MOST_IMAGES,
    MOST_NEW_IMAGES,
    PictureReader,
    too_many,
)
from lowbit.runtime.serve.errors import ApiError, invalid
from lowbit.runtime.serve.request.contents import IMAGE, Content, PlacedPart, media_of
from lowbit.runtime.serve.request.explain import WRONG
from lowbit.runtime.serve.request.parts import MediaPart, line_of
from lowbit.runtime.text.images import INSTEAD

FETCHED = re.compile(r"\s*(https?|file|ftp|gs|s3|blob):", re.IGNORECASE)
HTTP = re.compile(r"\s*https?:", re.IGNORECASE)
LEAST_DATA = 4096  # characters of base64 in a text that are taken for an image
# Base64 in one piece, or in lines of 60 to 76 characters as mail and `base64` break it; a last line
# that is shorter may as well be words, and stays.
DATA_IN_TEXT = re.compile(
    r"data:image/[\w.+-]{1,40}(?:;[\w.+-]{1,40}=[\w.+-]{1,40}){0,4};base64,\s{0,4}"
    rf"(?:[A-Za-z0-9+/=_-]{{{LEAST_DATA},}}"
    rf"|(?:[A-Za-z0-9+/=_-]{{60,76}}(?:\r?\n|\\n)){{{LEAST_DATA // 76},}})",
    re.IGNORECASE,
)
NAMED = {"none": "auto", "": "auto", "original": "high"}  # details under other names
IN_TEXT = "image in text"  # name of what is left out
SEND = "send the file itself: data:image/png;base64,..."
UNREADABLE = "image that cannot be read"  # name of one of an earlier turn that is left out


def read_images(contents: Sequence[Content], prompts: PromptEncoder) -> list[str]:
    """Read the images of messages, the newest last; names of what the prompt will lack.

    A line of text stands for an image of an earlier turn that cannot be read, for images that a
    model does not take, and for sounds, files and videos.

    Raises:
        ApiError: by its part, an image of the newest turn that cannot be read; a sound, file or
            video of the newest message, if a person says it; or an image that the model does not
            take, if that message has nothing else.
        ResourceError: Pillow is not installed.
    """
    reader = None if prompts.images is None else prompts.reader()
    shown: list[PlacedPart] = []
    left_out: list[str] = []
    for each in media_of(contents):
        if each.shows and reader is not None:
            shown.append(each)
            continue
        if each.content is contents[-1] and not each.tool:
            _check_other(each)
        left_out.append(each.part.kind)
    if reader is not None:
        check_number(shown)
        left_out += [UNREADABLE for each in by_age(shown) if not _reads(each, reader)]
    return left_out


def by_age(parts: Sequence[PlacedPart]) -> list[PlacedPart]:
    """Parts of the newest turn in their order, and then the others from the newest to the oldest.

    Where a limit of all images is met, an old one is left out.
    """
    newest = [each for each in parts if each.newest]
    return newest + [each for each in reversed(parts) if not each.newest]


def refused(error: RequestError, where: str) -> ApiError:
    """The API's error for an image that cannot be read, by its part."""
    words = f"{error}; {error.hint}" if error.hint else str(error)
    return invalid(f"`{where}`: {words}", where, WRONG)


def check_number(images: Sequence[PlacedPart]) -> None:
    """Refuse more images than a prompt or its newest turn may have, before any is decoded.

    Raises:
        ApiError: by the first that is too many.
    """
    newest = [each for each in images if each.newest]
    if len(newest) > MOST_NEW_IMAGES:
        error = too_many(MOST_NEW_IMAGES, "the newest turn")
        raise refused(error, newest[MOST_NEW_IMAGES].where)
    if len(images) > MOST_IMAGES:
        raise refused(too_many(MOST_IMAGES), images[MOST_IMAGES].where)


def _check_other(found: PlacedPart) -> None:
    """Refuse a part of the newest message that the prompt would lack."""
    part, where, content = found.part, found.where, found.content
    if part.kind != IMAGE:
        raise invalid(
            f"`{where}`: type `{part.type}` is not supported in the newest message, only text and "
            f"images; {INSTEAD[part.kind]}",
            where,
            WRONG,
        )
    if not content.has_more():
        why = (
            "by this model, which has no vision tower"
            if content.shows
            else "in messages of this role, only in those of a user or a tool"
        )
        raise invalid(
            f"`{where}`: type `{part.type}` is not supported {why}, and the newest message has "
            "nothing else",
            where,
            WRONG,
        )


def _reads(found: PlacedPart, reader: PictureReader) -> bool:
    """Read an image; False for one of an earlier turn that cannot be read."""
    try:
        file, detail = _file_of(found.part)
        found.part.read_as(reader.read(file, _detail_of(detail)))
    except RequestError as error:
        if found.newest:
            raise refused(error, found.where) from None
        reason = error.reason if isinstance(error, UnreadableImageError) else str(error)
        found.part.read_as(None, reason)
        return False
    return True


def _detail_of(given: object) -> object:
    """A detail under its own name, or what is none as it is."""
    if given is not None and not isinstance(given, str):
        return given
    name = str(given).strip().lower()
    return NAMED.get(name, name)


def _file_of(part: MediaPart) -> tuple[bytes | EncodedFile, object]:
    """The file of an image part, and its detail.

    Raises:
        RequestError: it has none, or names one that would have to be fetched.
    """
    address, detail = part.address, part.detail
    if isinstance(address, Mapping):
        detail = address.get("detail", detail)
        address = address.get("url")
    if isinstance(part.fetched, RequestError):
        raise part.fetched
    if part.fetched is not None:
        return part.fetched, detail
    if part.source is not None:
        return _of_source(part.source), part.detail
    if address is None and part.data is not None:
        return _of_base64(part.data, "data"), detail
    if address is None and part.file_id is not None:
        raise RequestError("`file_id` names a file, and no file is stored here", SEND)
    return _of_url(address), detail


def address_of(part: MediaPart) -> str | None:
    """The http or https address that an image part names; None where it has its file itself."""
    found, source = part.address, part.source
    if source is not None:
        found = source if isinstance(source, Mapping) and source.get("type") == "url" else None
    if isinstance(found, Mapping):
        found = found.get("url")
    return found if isinstance(found, str) and HTTP.match(found) else None


def _of_url(address: Any) -> EncodedFile:
    if not isinstance(address, str):
        raise RequestError(f"an image's address must be text, got {shown(address)}", SEND)
    if FETCHED.match(address):
        raise RequestError(
            f"the image's address is {shown(address)}, which this server does not fetch", SEND
        )
    return EncodedFile(address, bytes_of_data_url)


def _of_source(source: Any) -> EncodedFile:
    """The file of an image as Anthropic's API has it."""
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "url":
        return _of_url(source.get("url"))
    if kind != "base64":
        raise RequestError(
            f"`source.type` must be base64, got {shown(kind)}", "send the file's base64 as `data`"
        )
    return _of_base64(source.get("data"), "source.data")


def _of_base64(data: Any, field: str) -> EncodedFile:
    """The file that a field has as base64, or as the whole `data:` URL."""
    if not isinstance(data, str):
        raise RequestError(f"`{field}` must be base64, got {shown(data)}")
    is_url = data[:5].lower() == "data:"
    return EncodedFile(data, bytes_of_data_url if is_url else bytes_of_base64)


def without_data(
    messages: Sequence[Mapping[str, Any]], left_out: list[str]
) -> list[dict[str, Any]]:
    """Messages with a line of text for each image that a client has written out as base64.

    Such an image is tens of thousands of tokens that no model can read.
    """
    found = []
    for message in messages:
        content = message.get("content")
        cut = _without(content, left_out) if isinstance(content, str) else content
        if isinstance(content, list):
            cut = [
                {**part, "text": _without(part["text"], left_out)}
                if part.get("type") == "text"
                else part
                for part in content
            ]
        found.append({**message, "content": cut} if "content" in message else dict(message))
    return found


def _without(text: str, left_out: list[str]) -> str:
    if len(text) < LEAST_DATA:
        return text
    cut, count = DATA_IN_TEXT.subn(line_of(IMAGE), text)
    left_out += [IN_TEXT] * count
    return cut
