"""The draft head: some rows of a model's head, packed to INT4, that drafts are chosen from.

It lies in a folder of its own, since engines take every safetensors file at the top for the model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.formats.head_rows import (
    PackedRows,
    RowsFile,
    head_rows_bytes,
    head_rows_size,
    open_head_rows,
)
from lowbit.formats.layout.scheme import Scheme

DRAFT_FOLDER = "draft"
DRAFT_FILE = f"{DRAFT_FOLDER}/head.safetensors"
BITS = 4
_FILE = RowsFile(
    name=DRAFT_FILE,
    bits=BITS,
    version_key="lowbit_draft_head",
    version="1",
    hint="convert again, or remove the folder to draft with the whole head",
)


def open_draft_head(folder: Path, config: Mapping[str, Any]) -> PackedRows | None:
    """Read the draft head of a packed folder, every part of it checked; None where it has none.

    Raises:
        FormatError, UnsupportedModelError: see `open_head_rows`.
    """
    return open_head_rows(_FILE, folder, config)


def draft_head_size(rows: int, hidden: int, scheme: Scheme) -> int:
    """Bytes of the file of a draft head."""
    return head_rows_size(_FILE, rows, hidden, scheme)


def draft_head_bytes(head: PackedRows) -> bytes:
    """Content of the file."""
    return head_rows_bytes(_FILE, head)
