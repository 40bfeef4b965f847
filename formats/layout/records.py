"""Frozen dataclasses read from JSON objects with exactly their fields and types."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from lowbit.formats.errors import FormatError
from lowbit.formats.files import strict_json
from lowbit.formats.files.reading import read_bytes

Record = TypeVar("Record")

_LARGEST_INT = 2**63 - 1


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
    return _versioned(raw, path, version_key, (version,), hint)[1]


def load_versioned(
    path: Path, version_key: str, known: Sequence[int], hint: str
) -> tuple[int, dict[str, Any]]:
    """Read the version of a file that lowbit wrote, and its JSON object without the version.

    Args:
        path: of the file.
        version_key: key of the version in the object.
        known: versions that can be read.
        hint: advice for a file of another version.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: not a regular file, or a link out of its folder.
        FormatError: not a JSON object, or of a version that is not known.
    """
    return _versioned(read_bytes(path), path, version_key, known, hint)


def _versioned(
    raw: bytes, path: Path, version_key: str, known: Sequence[int], hint: str
) -> tuple[int, dict[str, Any]]:
    content = strict_json.object_of(raw, path, FormatError)
    found = content.pop(version_key, None)
    if type(found) is not int or found not in known:
        what = version_key.replace("_", " ")
        reads = " and ".join(map(str, known))
        raise FormatError(f"`{path}`: {what} {found}, this release reads {reads}", hint=hint)
    return found, content


def records(kind: type[Record], content: Any, where: str) -> tuple[Record, ...]:
    """Make a tuple of dataclasses from a JSON list; errors as in `record`."""
    if not isinstance(content, list):
        raise FormatError(f"`{where}` is not a list")
    return tuple(record(kind, row, where) for row in content)


def record(kind: type[Record], content: Any, where: str) -> Record:
    """Make a dataclass from a JSON object that has exactly its fields.

    A list stands for a tuple, and null for infinity where a float is required, since JSON has
    neither.

    Args:
        kind: dataclass whose fields are scalars, tuples, dicts or dataclasses made before.
        content: the object.
        where: names it in messages.

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
    values = {name: _read(value, kinds[name]) for name, value in content.items()}
    for name, value in values.items():
        if not _fits(value, kinds[name]):
            raise FormatError(f"`{where}`: `{name}` cannot be {json.dumps(content[name])[:80]}")
    return kind(**values)


def _read(value: Any, kind: Any) -> Any:
    if isinstance(value, list) and get_origin(kind) is tuple:
        return tuple(value)
    return math.inf if value is None and kind is float else value


def _fits(value: Any, kind: Any) -> bool:
    """Tell if a value is of a field's type: a bool is no int, a text no list.

    NaN and integers beyond 64 bits do not fit.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in args
    if origin is UnionType:
        return any(_fits(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
    if kind is float:
        return _fits(value, int) or (type(value) is float and not math.isnan(value))
    if kind is int:
        return type(value) is int and abs(value) <= _LARGEST_INT
    return type(value) is (type(None) if kind is None else origin or kind)
