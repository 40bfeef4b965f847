"""Values of a JSON object from a file, read by a table of keys, types and ranges."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from lowbit.formats.errors import LowbitError, UnsupportedModelError

ValueKind = Literal["integer", "number", "flag", "text"]
REQUIRED: Final = object()  # default of a key that must be there
CONFIG = "config.json"
MAX_SHOWN = 60  # characters of a value that a message quotes


@dataclass(frozen=True, slots=True)
class Field:
    """A key of a JSON object, with the values that it may have."""

    key: str  # name in the JSON object
    # type of the value; a number may be an integer, an integer may not be 1.0 or true
    kind: ValueKind = "integer"
    least: float = -math.inf  # smallest value of an integer or number; numbers are always finite
    most: float = math.inf  # largest value
    exclusive: bool = False  # `least` itself is not allowed
    even: bool = False  # an integer must be a multiple of two
    default: Any = REQUIRED  # value of a key that is absent
    nullable: bool = False  # null reads as the default; elsewhere it is refused

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        if self.kind in ("flag", "text"):
            return "true or false" if self.kind == "flag" else "a string"
        noun = {"integer": "an integer", "number": "a number"}[self.kind]
        if self.even:
            noun = "an even integer"
        low, high = _bound(self.least), _bound(self.most)
        if self.exclusive:
            return f"{noun} above {low}" + ("" if high is None else f" and at most {high}")
        if high is None:
            return f"a finite number of at least {low}" if low is not None else "a finite number"
        return f"{noun} from {low} to {high}"

    def allows(self, value: object) -> bool:
        """Tell if a value has the type and lies in the range."""
        if self.kind == "flag" or isinstance(value, bool):
            return self.kind == "flag" and isinstance(value, bool)
        if self.kind == "text":
            return isinstance(value, str)
        if isinstance(value, float):
            if self.kind != "number" or not math.isfinite(value):
                return False
        elif not isinstance(value, int) or (self.even and value % 2):
            return False
        above = value > self.least if self.exclusive else value >= self.least
        return above and value <= self.most and abs(value) <= _LARGEST


_LARGEST = 1.7e308  # larger integers do not fit a float


def read_fields(
    content: Mapping[str, Any],
    fields: Iterable[Field],
    where: str = CONFIG,
    error: type[LowbitError] = UnsupportedModelError,
) -> dict[str, Any]:
    """Values of several fields by key; arguments and errors as in `read_field`."""
    return {field.key: read_field(content, field, where, error) for field in fields}


def read_field(
    content: Mapping[str, Any],
    field: Field,
    where: str = CONFIG,
    error: type[LowbitError] = UnsupportedModelError,
) -> Any:
    """One value of a JSON object: int, float, bool or str by the field's kind, or its default.

    Raises:
        LowbitError: of class `error`, naming the key, the values allowed and the one found.
    """
    value = content.get(field.key)
    if value is None:
        if field.default is REQUIRED:
            raise error(f"{where} lacks `{field.key}`")
        if field.key not in content or field.nullable:
            return field.default
    if not field.allows(value):
        raise error(f"{where}: `{field.key}` must be {field.expected}, got {shown(value)}")
    return float(value) if field.kind == "number" and value is not None else value


def read_ids(
    content: Mapping[str, Any],
    key: str,
    vocab_size: int,
    where: str = CONFIG,
    error: type[LowbitError] = UnsupportedModelError,
) -> tuple[int, ...]:
    """Token ids of a key that holds one id, a list of ids, or null; empty if absent.

    Raises:
        LowbitError: of class `error`, for an id that the vocabulary does not have.
    """
    value = content.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for id in ids:
        if type(id) is not int or not 0 <= id < vocab_size:
            raise error(
                f"{where}: `{key}` must be a token id from 0 to {vocab_size - 1}, or a list of "
                f"them, got {shown(id)}"
            )
    return tuple(ids)


def shown(value: object) -> str:
    """A value as the file writes it, shortened; of lists and objects only the kind."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and value.bit_length() > 3 * MAX_SHOWN:
        return f"an integer of {int(value.bit_length() * math.log10(2)) + 1} digits"
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        value = f"{value[:MAX_SHOWN]}..."
    return json.dumps(value, ensure_ascii=False, default=repr)


def _bound(value: float) -> str | None:
    """A bound in words: integers in full, others to six digits; None for an infinite one."""
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return None
    return str(int(value)) if value.is_integer() and abs(value) < 1e9 else f"{value:g}"
