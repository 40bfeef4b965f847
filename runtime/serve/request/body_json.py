"""JSON of a body whose texts may be images of megabytes.

Such texts are taken out and parsed apart, by a parser that copies them at memory's speed; the rest
is read strictly with short names in their places. Strict reading goes through a body several times,
a byte after another: 20 ms for a photo of 4,000 x 3,000 pixels, and 2 ms so.
"""

import re
import secrets
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from lowbit.formats.files.strict_json import Pairs, loads, object_of_pairs

TEXT = TypeAdapter(str)
LONG = 64 << 10  # bytes of a text that is parsed apart
# Ends what comes before the value of a field
COLON = re.compile(rb":[ \t\r\n]{0,8}\Z")


def loads_body(raw: bytes) -> Any:
    """Parse a body; errors as in `strict_json.loads`, without NaN."""
    if (found := _apart(raw)) is not None:
        return found
    return loads(raw, nan=False)


def _apart(raw: bytes) -> Any:
    """A body whose long texts were parsed apart; None if it has none, or is to be read whole.

    Errors are those of the whole body.
    """
    texts: dict[str, str] = {}
    parts: list[bytes] = []
    end, secret = 0, secrets.token_hex(16)  # which no client can have written
    for first, last in _stretches(raw):
        try:
            text = TEXT.validate_json(raw[first - 1 : last + 1])
        except ValueError:  # such as for one that ends in an escaped quote
            continue
        name = f"{secret}{len(texts):x}"
        texts[name] = text
        parts += (raw[end:first], name.encode())
        end = last
    if not texts:
        return None
    parts.append(raw[end:])
    left = set(texts)

    def make(pairs: Pairs) -> dict[str, Any]:
        found = object_of_pairs(pairs)
        for name, value in pairs:
            if type(value) is str and value in texts:
                found[name] = texts[value]
                left.discard(value)
        return found

    try:
        content = loads(b"".join(parts), nan=False, make=make)
    except ValueError:
        return None
    return None if left else content


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
