"""Errors of a body in JSON's words: the place, the values expected, and the one found."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from lowbit.runtime.serve.errors import ApiError, cut, invalid, unsupported

MOST_SHOWN = 40  # characters of a value
WRONG = "invalid_value"
ABSENT: Final = object()
FEWER = "send fewer, or several requests"

# The value that a field should have, by pydantic's type of error.
KINDS = {
    **dict.fromkeys(("string_type", "string_sub_type"), "a string"),
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "`true` or `false`"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    "list_type": "an array",
    "none_required": "`null`",
    "finite_number": "a finite number",
}
UNITS: dict[type, str] = {str: "character", list: "item", dict: "field"}
Bound = Callable[[Mapping[str, Any], Any], str]


class ItemError(ValueError):
    """A validator's error about an item of the array that it checks."""

    def __init__(self, words: str, index: int) -> None:
        """Keep the item's index."""
        super().__init__(words)
        self.index = index


def _length(least: bool) -> Bound:
    def words(context: Mapping[str, Any], value: Any) -> str:
        most = context["min_length" if least else "max_length"]
        unit = UNITS.get(type(value), "item") + ("s" if most != 1 else "")
        bound = "must have at least" if least else "may have at most"
        return f"{bound} {most} {unit}, got {len(value) if hasattr(value, '__len__') else 'more'}"

    return words


def _number(words: str, key: str) -> Bound:
    return lambda context, value: f"must be {words} {context[key]}, got {got(value)}"


BOUNDS: dict[str, Bound] = {
    **dict.fromkeys(("too_short", "string_too_short"), _length(least=True)),
    **dict.fromkeys(("too_long", "string_too_long"), _length(least=False)),
    "greater_than_equal": _number("at least", "ge"),
    "greater_than": _number("above", "gt"),
    "less_than_equal": _number("at most", "le"),
    "less_than": _number("below", "lt"),
}


def explained(error: ValidationError, content: object) -> ApiError:
    """The API's error for a body that breaks its schema.

    Args:
        error: pydantic's, with an error for every form that a field may have.
    """
    found = error.errors(include_url=False, include_input=False)
    alike = [
        Fault(*_place(each, content), each["loc"], each["type"], each["msg"], each.get("ctx", {}))
        for each in found
        if each["loc"][:1] == found[0]["loc"][:1]
    ]
    best = max(alike, key=_weight)
    place, kind = best.place, best.kind
    if kind == "extra_forbidden":
        return unsupported(place)
    if kind == "missing":
        return _missing(place)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _tagged(best)
    if kind in BOUNDS:
        problem = BOUNDS[kind](best.context, best.value)
        problem += f"; {FEWER}" if kind == "too_long" else ""
    elif best.expected:
        kinds = dict.fromkeys(each.expected for each in alike if each.place == place)
        problem = f"must be {' or '.join(filter(None, kinds))}, got {got(best.value)}"
    else:
        problem = best.message.removeprefix("Value error, ")
        return invalid(f"`{place}`: {problem}" if place else problem, place or None, WRONG)
    return invalid(f"`{place}` {problem}", place, WRONG)


@dataclass(frozen=True, slots=True)
class Fault:
    """An error of pydantic's."""

    place: str  # path in the body, such as `messages[0].content`
    value: object
    steps: Sequence[int | str]  # pydantic's own path, with names of schemas
    kind: str
    message: str
    context: Mapping[str, Any]

    @property
    def expected(self) -> str:
        """The values that the place should have, if it is they that are wrong; else empty."""
        if self.kind == "literal_error":
            words: str = self.context["expected"]
            return re.sub("[`'](.*?)[`']", r"`\1`", words.replace("False", "`false`"))
        return KINDS.get(self.kind, "")


def _weight(fault: Fault) -> tuple[bool, int, bool, list[int]]:
    """Sort key of the clearest of several errors of one field.

    That of a form whose kind fits, then the deepest, then ours, then the last.
    """
    fits = not fault.expected or (fault.kind == "literal_error" and isinstance(fault.value, str))
    items = [step for step in fault.steps if isinstance(step, int)]
    return fits, len(fault.steps), fault.kind == "value_error", items


def got(value: object) -> str:
    """A value as JSON writes it, shortened; of arrays and objects only the kind."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if value is ABSENT:
        return "nothing"
    if isinstance(value, int) and value.bit_length() > 3 * MOST_SHOWN:
        return "an integer of more than 36 digits"
    return cut(json.dumps(value, ensure_ascii=False), MOST_SHOWN)


def _missing(place: str) -> ApiError:
    return invalid(f"`{place}` is missing", place, "missing_required_parameter")


def _tagged(fault: Fault) -> ApiError:
    field, value = fault.context["discriminator"].strip("'"), fault.value
    where = f"{fault.place}.{field}" if fault.place else field
    if not isinstance(value, dict) or field not in value:
        return _missing(where)
    tags = fault.context["expected_tags"].replace("'", "`")
    known = " or ".join(tags.rsplit(", ", 1))
    return invalid(f"`{where}` must be {known}, got {got(value[field])}", where, WRONG)


def _place(error: Any, content: object) -> tuple[str, object]:
    """Path of an error's place in a body, without names of schemas, and the value there."""
    path, steps = "", error["loc"]
    for number, step in enumerate(steps, start=1):
        lacks = error["type"] == "missing" and number == len(steps)
        if isinstance(step, int) and isinstance(content, list):
            path += f"[{step}]"
            content = content[step] if step < len(content) else ABSENT
        elif isinstance(content, dict) and (step in content or lacks):
            path += f".{step}" if path else str(step)
            content = content.get(step, ABSENT)
    if isinstance(cause := error.get("ctx", {}).get("error"), ItemError):
        path += f"[{cause.index}]"
    return cut(path), content
