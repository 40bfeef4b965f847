"""JSON of a body whose texts may be images of megabytes.

Such texts are taken out and parsed apart, by a parser that copies them at memory's speed; the rest
is read strictly with short names in their places. Strict reading goes through a body several times,
a byte after another: 20 ms for a photo of 4,000 x 3,000 pixels, and 2 ms so.
"""

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from lowbit.formats.files.strict_json import Pairs, loads, object_of_pairs

TEXT = TypeAdapter(str)
LONG = 64 << 10  # bytes of a text that is parsed apart
NAME = 40  # bytes of what stands for one
# Ends what comes before the value of a field
COLON = re.compile(rb":[ \t\r\n]{0,8}\Z")


def loads_body(raw: bytes) -> Any:
    """Parse a body; errors as in `strict_json.loads`, without NaN."""
    if len(raw) < LONG:
        return loads(raw, nan=False)
    short = _shorten(raw)
    try:
        if short.texts and (found := short.loads()) is not None:
            return found
    except json.JSONDecodeError as error:
        place = short.place_in_body(len(error.doc[: error.pos].encode()))
        if place is not None:
            characters = len(raw[:place].decode())
            raise json.JSONDecodeError(error.msg, raw.decode(), characters) from None
    except UnicodeDecodeError as error:
        place = short.place_in_body(error.start)
        if place is not None:
            last = place + error.end - error.start
            raise UnicodeDecodeError(error.encoding, raw, place, last, error.reason) from None
    return loads(raw, nan=False)


@dataclass(slots=True)
class _Short:
    """A body with names in place of long texts.

    Attributes:
        raw: it; empty where it would have no name.
        texts: by their names.
        cuts: beginnings and ends of the texts in the whole body.
    """

    raw: bytearray = field(default_factory=bytearray)
    texts: dict[str, str] = field(default_factory=dict)
    cuts: list[tuple[int, int]] = field(default_factory=list)

    def loads(self) -> Any:
        """Content of the whole body; None if not each name is the value of a field."""
        left = set(self.texts)

        def make(pairs: Pairs) -> dict[str, Any]:
            found = object_of_pairs(pairs)
            for name, value in pairs:
                if type(value) is str and value in self.texts:
                    found[name] = self.texts[value]
                    left.discard(value)
            return found

        content = loads(bytes(self.raw), nan=False, make=make)
        return None if left else content

    def place_in_body(self, place: int) -> int | None:
        """Map a place in the short body, where its parser stopped, to the whole body.

        Up to that place both bodies have the same JSON but for the content of texts, so that the
        error is the same. None at a name: there the name replaced something that is no text, and
        the error says nothing of the whole body.
        """
        left_out = 0
        for first, last in self.cuts:
            name = first - left_out
            if place < name:
                break
            if place <= name + NAME:
                return None
            left_out += last - first - NAME
        return place + left_out


def _shorten(raw: bytes) -> _Short:
    """A body whose long texts have been parsed."""
    short, end, secret = _Short(), 0, secrets.token_hex(16)  # which no client can have written
    for first, last in _stretches(raw):
        try:
            text = TEXT.validate_json(raw[first - 1 : last + 1])
        except ValueError:  # such as for one that ends in an escaped quote
            continue
        name = f"{secret}{len(short.texts):08x}"
        short.texts[name] = text
        short.cuts.append((first, last))
        short.raw += raw[end:first] + name.encode()
        end = last
    if short.texts:
        short.raw += raw[end:]
    return short


def _stretches(raw: bytes) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of what is long between two quotes, the first of them behind a colon.

    It need not be a text. A short name in place of anything else leaves no JSON: no word stands
    between two texts.
    """
    place = LONG
    while (last := raw.find(b'"', place)) >= 0:
        first = raw.rfind(b'"', 0, place) + 1
        if first and last - first >= LONG and _is_value(raw, first - 1):
            yield first, last
        place = last + LONG


def _is_value(raw: bytes, quote: int) -> bool:
    return COLON.search(raw[max(quote - 9, 0) : quote]) is not None
