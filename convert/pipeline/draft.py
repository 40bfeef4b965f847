"""The mark of a model card that lowbit-convert wrote; a later edit shows by its hash."""

import hashlib
import re
from pathlib import Path

from lowbit.formats.files.reading import read_bytes

_MARK = re.compile(r"\n<!-- lowbit draft ([0-9a-f]{64}) -->\n\Z")


def marked(card: str) -> bytes:
    """The card with its own hash in a comment."""
    digest = hashlib.sha256(card.encode()).hexdigest()
    return f"{card}\n<!-- lowbit draft {digest} -->\n".encode()


def is_untouched_draft(path: Path) -> bool:
    """Tell whether `marked` made a card and nobody has edited it since.

    Raises:
        CheckpointError: a pipe, a device, or a link out of the folder.
    """
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return False
    text = content.decode(errors="replace").replace("\r\n", "\n")
    mark = _MARK.search(text)
    return mark is not None and hashlib.sha256(text[: mark.start()].encode()).hexdigest() == mark[1]
