"""JSON that others wrote, read strictly: one reading, bounded memory, text that can be written."""

import json
import re
from typing import Any

MAX_DEPTH = 64  # of objects and lists; config.json has 4, a tokenizer 8
MAX_CONTAINERS = 2_000_000  # of 60 bytes and more each; a large tokenizer has 500,000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def loads(raw: bytes) -> Any:
    """Parse JSON.

    Args:
        raw: UTF-8.

    Raises:
        ValueError: not JSON, a key that stands twice in an object, half a surrogate pair, or
            objects nested too deeply or too many.
    """
    if raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS:
        raise ValueError(f"more than {MAX_CONTAINERS} objects and lists")
    try:
        content = json.loads(raw.decode(), object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    _check_depth(content)
    if _SURROGATE.search(raw):
        _check_unicode(content)
    return content


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key `{name[:80]}` stands twice")
            seen.add(name)
    return found


def _check_depth(content: Any) -> None:
    """Refuse what a writer of JSON, or a walk over it, could not follow."""
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
    if level:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _check_unicode(content: Any) -> None:
    """Refuse text that UTF-8 cannot hold."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair stands for a character") from None
