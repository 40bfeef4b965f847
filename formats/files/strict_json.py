"""Strict reading of untrusted JSON: unique keys, bounded memory and depth, encodable text."""

import gc
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, compress
from pathlib import Path
from typing import Any, NoReturn

from lowbit.formats.errors import CheckpointError, LowbitError

MAX_DEPTH = 64  # nesting of objects and lists; config.json has 4, a tokenizer 8
# A value takes up to 300 bytes in memory. Gemma's tokenizer has 1,800,000; headers have 8 a tensor.
MAX_VALUES = 2_000_000
_CONTAINERS = frozenset((dict, list))
Pairs = list[tuple[str, Any]]  # names and values of an object
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def object_of_pairs(pairs: Pairs) -> dict[str, Any]:
    """An object of its names and values; raises ValueError for a name that stands twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key `{name[:80]}` stands twice")
            seen.add(name)
    return found


def loads(
    raw: bytes,
    nan: bool = True,
    make: Callable[[Pairs], dict[str, Any]] = object_of_pairs,
) -> Any:
    """Parse JSON.

    Args:
        raw: UTF-8.
        nan: also take `NaN` and `Infinity`, which some files have and JSON lacks.
        make: makes an object; calls `object_of_pairs`.

    Raises:
        ValueError: not JSON, a key that stands twice in an object, half a surrogate pair, objects
            nested too deeply, or more than MAX_VALUES values.
    """
    if len(raw) > MAX_VALUES:  # else there cannot be more: each takes a byte
        # At most; commas in text count too
        values = sum(raw.count(sign) for sign in (b",", b"[", b"{"))
        if values > MAX_VALUES:
            raise ValueError(f"{values} values, expected at most {MAX_VALUES}")
    try:
        with _without_collection():
            constant = None if nan else _no_constant
            content = json.loads(raw.decode(), object_pairs_hook=make, parse_constant=constant)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        if "int_max_str_digits" in str(error):  # advice for programmers
            raise ValueError("an integer has too many digits") from None
        raise
    _check(content, unicode=_SURROGATE.search(raw) is not None)
    return content


def object_of(raw: bytes, path: Path, error: type[LowbitError] = CheckpointError) -> dict[str, Any]:
    """Parse the JSON object that a file holds.

    Raises:
        LowbitError: of class `error`: `loads` refuses the content, or it is not an object.
    """
    try:
        content = loads(raw)
    except ValueError as reason:
        raise error(f"`{path}` is not valid JSON: {reason}") from None
    if not isinstance(content, dict):
        raise error(f"`{path}` does not hold a JSON object")
    return content


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the garbage collector, which would double the time of parsing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _check(content: Any, unicode: bool) -> None:
    """Refuse nesting beyond MAX_DEPTH, on which recursive code would fail.

    Args:
        unicode: also refuse text that UTF-8 cannot hold.
    """
    items = [content]
    for _ in range(MAX_DEPTH + 1):
        if unicode:
            _check_unicode(items)
        level = list(compress(items, map(_CONTAINERS.__contains__, map(type, items))))
        if not level:
            return
        items = list(chain.from_iterable(x.values() if type(x) is dict else x for x in level))
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _check_unicode(items: list[Any]) -> None:
    """Refuse half surrogate pairs in texts and in keys of objects."""
    try:
        for item in items:
            if isinstance(item, str):
                item.encode()
            elif isinstance(item, dict):
                for name in item:
                    name.encode()
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair stands for a character") from None
