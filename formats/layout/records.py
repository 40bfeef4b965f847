"""Frozen dataclasses read from JSON objects with exactly their fields and types."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from lowbit.formats.errors import FormatError
from lowbit.formats.files import strict_json
from lowbit.formats.files.reading import read_bytes

Record = TypeVar("Record")

SEAL = "sha256"  # key of an object's hash of all else in it, its version aside
_LARGEST_INT = 2**63 - 1
_AS_THEY_ARE = (str, int, bool)  # what most fields are; others take longer to look at
_UNIONS = (UnionType, Union)  # `Literal[...] | None` is of the second


def load_object(path: Path, version_key: str, version: int, hint: str) -> dict[str, Any]:
    """Read the JSON object of a file that lowbit wrote, without its version.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: not a regular file, or a link out of its folder.
        FormatError: not a JSON object, or of another version.
    """
    return parse_object(read_bytes(path), path, version_key, version, hint)


def parse_object(
    raw: bytes, path: Path, version_key: str, version: int, hint: str
) -> dict[str, Any]:
    """Do what `load_object` does for content already read; `path` names it in messages.

    Raises:
        FormatError: not a JSON object, or of another version.
    """
    content = strict_json.object_of(raw, path, FormatError)
    found = content.pop(version_key, None)
    if type(found) is not int or found != version:
        what = version_key.replace("_", " ")
        raise FormatError(f"`{path}`: {what} {found}, this release reads {version}", hint=hint)
    return content


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """An object, without its version, and a hash that tells whether it was changed since."""
    return {**content, SEAL: _digest(content)}


def take_seal(content: dict[str, Any]) -> bool:
    """Remove an object's seal; False if it does not hold, True if it does or there is none.

    Readers look at everything else first, which says more of what is wrong.
    """
    seal = content.pop(SEAL, None)
    return seal is None or seal == _digest(content)


def broken_seal(path: Path, hint: str) -> FormatError:
    """The error of a file whose seal does not hold."""
    return FormatError(f"`{path}` was changed or damaged after it was written", hint=hint)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def record(kind: type[Record], content: Any, where: str) -> Record:
    """Make a dataclass, and all those within, from a JSON object that has exactly its fields.

    A list stands for a tuple, and null for infinity where a float is required, since JSON has
    neither.

    Args:
        kind: dataclass whose fields are scalars, dicts, dataclasses, tuples, or one of them or
            None.

    Raises:
        FormatError: naming the key that is missing, unknown or of another type.
    """
    if not isinstance(content, Mapping):
        raise FormatError(f"`{where}` is not an object")
    kinds = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    if content.keys() != kinds.keys():
        missing, extra = kinds.keys() - content.keys(), content.keys() - kinds.keys()
        raise FormatError(
            f"`{where}`: missing keys {sorted(missing)}, unknown keys {sorted(extra)}"
        )
    values = {name: _read(content[name], kinds[name], f"{where}: {name}") for name in kinds}
    for name, value in values.items():
        if not _fits(value, kinds[name]):
            raise FormatError(f"`{where}`: `{name}` cannot be {json.dumps(content[name])[:80]}")
    return kind(**values)


def finite(value: Any) -> Any:
    """A JSON value with null for every figure that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _read(value: Any, kind: Any, where: str) -> Any:
    """A JSON value with dataclasses, tuples and infinity in the places of their stand-ins."""
    if kind in _AS_THEY_ARE:
        return value
    if is_dataclass(kind):
        return record(kind, value, where)  # type: ignore[arg-type]
    args = get_args(kind)
    if get_origin(kind) in _UNIONS:
        inner = next(filter(is_dataclass, args), None)
        return value if value is None or inner is None else _read(value, inner, where)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_read(item, args[0], where) for item in value)
    if get_origin(kind) is tuple and is_dataclass(args[0]):
        raise FormatError(f"`{where}` is not a list")
    return math.inf if value is None and kind is float else value


def _fits(value: Any, kind: Any) -> bool:
    """Tell if a value is of a field's type: a bool is no int, a text no list.

    NaN and integers beyond 64 bits do not fit.
    """
    if kind is int:
        return type(value) is int and abs(value) <= _LARGEST_INT
    if kind in _AS_THEY_ARE:
        return type(value) is kind
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in args
    if origin in _UNIONS:
        return any(_fits(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
    if kind is float:
        return _fits(value, int) or (type(value) is float and not math.isnan(value))
    return type(value) is (type(None) if kind is None else origin or kind)
