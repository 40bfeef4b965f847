"""Bytes of a `data:` URL, and of base64 as clients write it.

Blanks, line breaks, missing padding and the alphabet of URLs have one sensible reading each and are
taken. What could mean several things is refused.
"""

import base64
import binascii
import re
from contextlib import suppress
from urllib.parse import unquote_to_bytes

from lowbit.formats.errors import RequestError
from lowbit.formats.fields import shown

SCHEME, BASE64 = "data:", "base64"
MOST_BYTES = 32 << 20  # of an image file
MOST_HEAD = 1000  # characters before the comma
FOREIGN = re.compile(r"[^A-Za-z0-9+/]")
# Signs of base64 as forms and URLs quote them, and line breaks of JSON that was quoted twice
QUOTED = {"%2B": "+", "%2F": "/", "%3D": "=", "%2b": "+", "%2f": "/", "%3d": "="}
BLANK = ("%0A", "%0D", "%20", "%0a", "%0d", "\\n", "\\r")
MOST_ESCAPES = 1 << 18  # others, each of which takes 240 bytes while it is read
TO_STANDARD = bytes.maketrans(b"-_", b"+/")
BLANKS = b" \t\n\r\v\f\x1c\x1d\x1e\x1f"
WIDE_BLANKS = (  # all others for which `str.isspace` is true
    "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
EXAMPLE = "data:image/png;base64,iVBORw0..."


def bytes_of_data_url(url: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Content of a `data:` URL, whatever media type it names.

    Raises:
        RequestError: another kind of URL, no comma, bad base64, nothing in it, or more than
            `most_bytes`.
    """
    text = url.strip()
    if text[: len(SCHEME)].lower() != SCHEME:
        raise RequestError(
            f"an image's address must begin with `{SCHEME}`, got {shown(url)}",
            hint=f"send the file itself: {EXAMPLE}",
        )
    head, comma, data = text.partition(",")
    if not comma or len(head) > MOST_HEAD:
        raise RequestError(
            f"a `{SCHEME}` URL has no comma between its type and its content: {shown(head)}",
            hint=f"it looks like this: {EXAMPLE}",
        )
    parameters = [part.strip().lower() for part in head.split(";")[1:]]
    if BASE64 in parameters:
        return bytes_of_base64(data, most_bytes)
    _check_size(len(data) - 2 * data.count("%"), most_bytes)
    return _checked(_unquoted(data), most_bytes)


def data_url(content: bytes) -> str:
    """A `data:` URL of an image file, whose type is told by its content alone."""
    return f"{SCHEME}image/*;{BASE64},{base64.b64encode(content).decode()}"


def bytes_of_base64(text: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Bytes that base64 stands for.

    Raises:
        RequestError: a sign that base64 lacks, an impossible length, padding within, nothing in
            it, or more than `most_bytes`.
    """
    with suppress(ValueError):  # as nearly all have it; the rest takes four times as long
        return _checked(_decoded(text.strip().rstrip("=")), most_bytes)
    for sign, plain in (*QUOTED.items(), *((sign, "") for sign in BLANK)):
        text = text.replace(sign, plain)
    if "%" in text:
        text = _unquoted(text).decode("latin-1")
    digits = _in_standard(text).rstrip("=")
    _check_size(len(digits) * 3 // 4, most_bytes)
    try:
        found = _decoded(digits)
    except ValueError:
        raise _bad_base64(digits) from None
    return _checked(found, most_bytes)


def _in_standard(text: str) -> str:
    """Base64 without blanks, in its usual alphabet.

    `str.split` would make an object of 50 bytes for every piece, and hold the interpreter's lock.
    """
    if not text.isascii():
        for blank in WIDE_BLANKS:
            text = text.replace(blank, "")
    raw = text.encode("utf-8", "surrogatepass").translate(TO_STANDARD, BLANKS)
    return raw.decode("utf-8", "surrogatepass")


def _decoded(digits: str) -> bytes:
    """Bytes of base64 without its padding.

    Raises:
        ValueError: anything else is in it, or its length is impossible.
    """
    return binascii.a2b_base64(digits + "=" * (-len(digits) % 4), strict_mode=True)


def _bad_base64(digits: str) -> RequestError:
    """The error for base64 without its padding that cannot be read."""
    if (foreign := FOREIGN.search(digits)) is None:
        return RequestError(
            f"the base64 of an image has {len(digits)} characters, which is one too many or it was "
            "cut short",
            hint="send the base64 of the whole file",
        )
    sign, place = foreign[0], foreign.start() + 1
    what = "padding before its end" if sign == "=" else f"{shown(sign)}, which base64 lacks"
    return RequestError(
        f"the base64 of an image has {what}, at character {place}",
        hint="send the base64 of the file and nothing else",
    )


def _unquoted(text: str) -> bytes:
    """Bytes of a text with escapes such as `%41`."""
    if (count := text.count("%")) > MOST_ESCAPES:
        raise RequestError(
            f"an image is written with {count} percent signs, expected at most {MOST_ESCAPES}",
            hint=f"send its base64: {EXAMPLE}",
        )
    return unquote_to_bytes(text.encode("utf-8", "surrogatepass"))


def _check_size(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise RequestError(
            f"an image has {size} bytes, expected at most {most_bytes}", hint="send a smaller one"
        )


def _checked(content: bytes, most_bytes: int) -> bytes:
    if not content:
        raise RequestError("an image is empty", hint=f"it looks like this: {EXAMPLE}")
    _check_size(len(content), most_bytes)
    return content
