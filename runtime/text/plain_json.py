"""JSON that a model writes, read leniently and written strictly."""

import json
from typing import Any, NoReturn


def read_json(text: str) -> Any:
    """Parse JSON; line breaks may stand in strings as they are, as models write them.

    Raises:
        ValueError: not JSON, NaN or an infinity, too deep nesting, or too long a number.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(value: Any) -> str:
    """Valid JSON that UTF-8 can hold.

    Raises:
        ValueError: a number that is not finite, or too deep nesting.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not is_unicode(text):
        return json.dumps(value)  # half a surrogate pair stays an escape
    return text


def is_unicode(text: str) -> bool:
    """Tell if UTF-8 can hold a text: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
