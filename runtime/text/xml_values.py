"""Grammar rules of arguments in the XML form, whose strings stand there without quotes.

A value that may be a string is one lexeme with its closing tag: the strings that the schema allows,
and numbers, truth values and null as text. Objects and lists are JSON; beside strings they are told
apart by their first character.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from lowbit.runtime.text.tools import ArgumentTypes, resolve, typed_value

END = r"\n<\/parameter>"
MOST_STEPS = 50_000  # parts and choices of the schemas of one grammar
MOST_DEPTH = 32  # of references and alternatives inside each other
OF_STRINGS = ("pattern", "minLength", "maxLength", "format")
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_INNER = (
    *("properties", "patternProperties", "additionalProperties", "required", "minProperties"),
    *("maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "items"),
    *("prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
    *("minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"),
)
OF_ALL = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef")
KNOWN = frozenset(
    (
        *("type", "enum", "const", "nullable", "$ref", "allOf", "anyOf", "oneOf"),
        *(*OF_STRINGS, *OF_NUMBERS, *OF_INNER, *OF_ALL),
    )
)
NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
SPELLED: Final = {
    "integer": r"-?(?:0|[1-9][0-9]*)",
    "number": NUMBER,
    "boolean": r"(?:[Tt]rue|[Ff]alse)",
    "null": r"(?:null|None)",
}
# Texts that are read as a value of another type than a string.
TAKEN_FOR: Final = {**SPELLED, "integer": NUMBER}
# `format` and `pattern` of a string, as expressions without anchors.
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


class UnheldError(Exception):
    """A keyword that the grammar of a text cannot hold.

    Attributes:
        keyword: keyword of the schema, and its value where that matters.
    """

    def __init__(self, keyword: str) -> None:
        """Keep the keyword."""
        super().__init__(keyword)
        self.keyword = keyword


Leaf = dict[str, Any]  # a schema of one type, without alternatives


@dataclass(slots=True)
class Steps:
    """Work that is left for one grammar, so that alternatives cannot multiply without end."""

    left: int = MOST_STEPS

    def spend(self, count: int) -> None:
        """Use up some of it.

        Raises:
            UnheldError: there is too little.
        """
        self.left -= count
        if self.left < 0:
            raise UnheldError("anyOf: too many alternatives")


def terminal_of(schema: Any, types: ArgumentTypes, steps: Steps) -> tuple[str, list[Leaf]] | None:
    """The lexeme of a value that may be a string, and what else the value may be.

    Returns:
        An expression up to the closing tag; objects and lists that the value may be instead. None
        for a value that is no string.

    Raises:
        UnheldError: a keyword that the expression cannot hold.
    """
    by_type: dict[str, list[Leaf]] = {}
    for leaf in _leaves(schema, types, steps, 0):
        by_type.setdefault(_type_of(leaf, types), []).append(leaf)
    if "" in by_type:
        return f"/(?s:.*){END}/", []
    if "string" not in by_type:
        return None
    _check_once(schema, types, by_type)
    others = {kind: found for kind, found in by_type.items() if kind in SPELLED}
    parts = [_alternative(kind, leaf) for kind, found in others.items() for leaf in found]
    inner = [leaf for kind in ("object", "array") for leaf in by_type.get(kind, ())]
    excluded = [
        rf"~/\s*{TAKEN_FOR[kind]}\s*{END}/"
        for kind, found in others.items()
        if any(_limits(leaf) for leaf in found)
    ]
    if inner:
        excluded.append(r"~/(?s:\s*[\[{].*)/")
    for leaf in by_type["string"]:
        if "enum" in leaf:
            _check_choices(leaf["enum"], schema, types, others)
        parts.append(" & ".join([*_of_string(leaf), *(() if "enum" in leaf else excluded)]))
    return " | ".join(f"({part})" for part in parts), inner


def _leaves(schema: Any, types: ArgumentTypes, steps: Steps, depth: int) -> Iterator[Leaf]:
    """The alternatives of a schema, each of one type if it names its type."""
    steps.spend(1)
    if depth > MOST_DEPTH:
        raise UnheldError("$ref")
    rest = _known(schema)
    if rest is None:
        return
    for keyword in OF_ALL:
        if keyword in rest:
            raise UnheldError(keyword)
    nullable = rest.pop("nullable", False) is True
    parts: list[Any] = [{}]
    if "$ref" in rest:
        parts = [resolve(rest.pop("$ref"), types.root)]
    elif isinstance(rest.get("allOf"), list):
        for part in rest.pop("allOf"):
            steps.spend(1)
            rest = _both(rest, _known(part) or {"enum": []})
    elif key := next((key for key in ("anyOf", "oneOf") if isinstance(rest.get(key), list)), None):
        parts = rest.pop(key)
    else:
        yield from _by_type(rest, steps)
        parts = []
    for part in parts:
        known = _known(part)
        if known is not None:
            yield from _leaves(_both(rest, known), types, steps, depth + 1)
    if nullable:
        yield {"type": "null"}


def _known(schema: Any) -> Leaf | None:
    """The keywords of a schema that allow or forbid values; None for one that allows none."""
    if isinstance(schema, bool):
        return {} if schema else None
    if not isinstance(schema, Mapping):
        raise UnheldError("$ref")
    return {key: value for key, value in schema.items() if key in KNOWN}


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for key in one.keys() & other.keys():
        if one[key] is not other[key] and one[key] != other[key]:
            raise UnheldError(key)
    return {**one, **other}


def _by_type(leaf: Leaf, steps: Steps) -> Iterator[Leaf]:
    """A schema without alternatives, by the types that it names and those of its choices."""
    if "const" in leaf:
        leaf = _both({"enum": [leaf["const"]]}, {k: v for k, v in leaf.items() if k != "const"})
    named, choices = leaf.get("type"), leaf.get("enum")
    if isinstance(named, list):
        for name in named:
            yield from _by_type({**leaf, "type": name}, steps)
    elif isinstance(choices, list):
        steps.spend(len(choices))
        by_type: dict[str, list[Any]] = {}
        for choice in choices:
            by_type.setdefault(_type_of_choice(choice), []).append(choice)
        for name, found in by_type.items():
            if named in (None, name) or (named, name) == ("number", "integer"):
                yield {**leaf, "type": name, "enum": found}
    else:
        yield leaf


def _type_of(leaf: Leaf, types: ArgumentTypes) -> str:
    """The type of an alternative; empty for one that allows every value."""
    if isinstance(leaf.get("type"), str):
        return str(leaf["type"])
    if any(key in leaf for key in OF_STRINGS):
        return "string"
    found = types.of(dict(leaf))
    if len(found) == 1:
        return next(iter(found))
    for key in leaf:
        if key in OF_NUMBERS:
            raise UnheldError(key)
    return ""


def _type_of_choice(choice: Any) -> str:
    for kind, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number")):
        if isinstance(choice, kind):
            return name
    return "null" if choice is None else "array" if isinstance(choice, list) else "object"


def _limits(leaf: Leaf) -> bool:
    return "enum" in leaf or any(key in leaf for key in OF_NUMBERS)


def _check_once(schema: Any, types: ArgumentTypes, by_type: Mapping[str, list[Leaf]]) -> None:
    """Refuse a `oneOf` that two alternatives of strings may fit at once."""
    if not _has_one_of(schema, types) or len(by_type["string"]) == 1:
        return
    choices = [leaf.get("enum") for leaf in by_type["string"]]
    known = [choice for found in choices if found is not None for choice in found]
    if None in choices or len(known) != len(set(known)):
        raise UnheldError("oneOf")


def _has_one_of(schema: Any, types: ArgumentTypes) -> bool:
    """True if a schema or what it refers to has `oneOf`."""
    for _ in range(MOST_STEPS):
        if not isinstance(schema, Mapping) or "oneOf" in schema:
            break
        schema = resolve(schema.get("$ref"), types.root)
    return isinstance(schema, Mapping)


def _check_choices(
    choices: list[str], schema: Any, types: ArgumentTypes, others: Mapping[str, list[Leaf]]
) -> None:
    """Refuse strings that would be read as another value, one that a limit may forbid."""
    limited = any(_limits(leaf) for found in others.values() for leaf in found)
    for choice in choices:
        ends = "</parameter>" in choice
        if ends or (limited and typed_value(choice, schema, types) != choice):
            raise UnheldError("enum")


def _alternative(kind: str, leaf: Leaf) -> str:
    for key in OF_NUMBERS:
        if key in leaf:
            raise UnheldError(key)
    if "enum" not in leaf:
        return f"/{SPELLED[kind]}{END}/"
    return " | ".join(f"/{regex_of_word(json.dumps(choice))}{END}/" for choice in leaf["enum"])


def _of_string(leaf: Leaf) -> Iterator[str]:
    """Expressions all of which a string follows, closing tag included."""
    if "enum" in leaf:
        words = [word for word in leaf["enum"] if _fits(word, leaf)]
        if not words:
            raise UnheldError("enum")
        yield "(" + " | ".join(f"/{regex_of_word(word)}{END}/" for word in words) + ")"
        return
    least, most = leaf.get("minLength", 0), leaf.get("maxLength", "")
    if not (_is_count(least) and (most == "" or _is_count(most))):
        raise UnheldError("minLength" if not _is_count(least) else "maxLength")
    bounds = "*" if (least, most) == (0, "") else f"{{{int(least)},{most and int(most)}}}"
    if most == 0:
        bounds = "{0}"
    yield f"/(?s:.{bounds}){END}/"
    if "pattern" in leaf:
        yield f"/{_escaped(_pattern(leaf['pattern']))}{END}/"
    if "format" in leaf:
        if leaf["format"] not in FORMATS:
            raise UnheldError(f"format: {leaf['format']!s:.40}")
        yield f"/(?:{_escaped(FORMATS[leaf['format']])}){END}/"


def _fits(word: str, leaf: Leaf) -> bool:
    """True if a choice has the length that stands beside it."""
    for key in ("pattern", "format"):
        if key in leaf:
            raise UnheldError(f"{key}` beside `enum")
    return bool(leaf.get("minLength", 0) <= len(word) <= leaf.get("maxLength", len(word)))


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _pattern(pattern: Any) -> str:
    try:
        return whole_text(pattern)
    except (UnknownPatternError, TypeError):
        raise UnheldError(f"pattern: {pattern!s:.80}") from None


def regex_of_word(word: str) -> str:
    """An expression that matches one text."""
    return "".join(map(_sign, word))


def _sign(sign: str) -> str:
    if sign < " ":
        return rf"\x{{{ord(sign):x}}}"
    return "\\" + sign if sign in r"\.+*?()|[]{}^$#&-~/" else sign


def _escaped(pattern: str) -> str:
    r"""A pattern between slashes: `/` becomes `\/`, and line breaks their escapes."""
    found, escaped = [], False
    for sign in pattern:
        if not escaped and sign in "/\n\r":
            found.append({"/": r"\/", "\n": r"\n", "\r": r"\r"}[sign])
        else:
            found.append(sign)
        escaped = sign == "\\" and not escaped
    return "".join(found)


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
    """True if no grammar can follow a part."""
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
