"""Regular expressions of texts: `pattern` and `format` of a JSON schema, without anchors."""

import re
from typing import Final

_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-"
    r"(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|"
    r"[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_WORD = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_SIGN = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"
FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "hostname": _HOST,
    "email": rf"{_WORD}(?:\.{_WORD})*@{_HOST}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}(?::[0-9]{{1,5}})?(?:/{_SIGN})?|{_SIGN})"
    rf"(?:\?{_SIGN})?(?:#{_SIGN})?",
}
# Parts of an expression: an escape, a class, a group's head or any other character.
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[:=!<P]?|.", re.DOTALL)
_SHORT = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}  # of ASCII alone, unlike those of the library


class UnknownPatternError(ValueError):
    """An expression with parts that no grammar can follow."""


def whole_text(pattern: str) -> str:
    """The expression of whole texts in which a pattern of a JSON schema is found.

    Raises:
        UnknownPatternError: it looks around, refers back, or has an anchor within.
    """
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        raise UnknownPatternError from None
    found = []
    for alternative in _alternatives(_PARTS.findall(pattern)):
        begins, ends = alternative[:1] == ["^"], alternative[-1:] == ["$"]
        inner = alternative[begins : len(alternative) - ends]
        if any(_is_beyond(part) for part in inner):
            raise UnknownPatternError
        anything = "(?s:.*)"
        text = "".join(map(_translated, inner))
        found.append(f"{'' if begins else anything}(?:{text}){'' if ends else anything}")
    return "(?:" + "|".join(found) + ")"


def _alternatives(parts: list[str]) -> list[list[str]]:
    """Parts between those `|` that stand in no group."""
    found: list[list[str]] = [[]]
    depth = 0
    for part in parts:
        depth += (part[0] == "(") - (part == ")")
        if part == "|" and depth == 0:
            found.append([])
        else:
            found[-1].append(part)
    return found


def _is_beyond(part: str) -> bool:
    """Tell if no grammar can follow a part."""
    if part[0] == "\\":
        return part[1] in "bBAZzGkKpPuUxNcQE" or part[1].isdigit()
    return part in ("^", "$") or (part[:2] == "(?" and part != "(?:")


def _translated(part: str) -> str:
    """A part in the library's notation."""
    if part in _SHORT:
        return f"[{_SHORT[part]}]"
    if part[0] == "[":
        return re.sub(r"\\.", lambda found: _SHORT.get(found[0], found[0]), part)
    return part
