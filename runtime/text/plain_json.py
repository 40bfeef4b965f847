"""JSON that a model writes, read leniently and written strictly."""

import json
import math
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


def is_plain(value: Any, depth: int) -> bool:
    """Tell if a value is made of what JSON has, with at most `depth` objects and lists nested."""
    if isinstance(value, list | dict) and depth == 0:
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list):
        return all(is_plain(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v, depth - 1) for k, v in value.items())
    return value is None or isinstance(value, str | bool | int)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
