"""Rows of a model's head for its most frequent tokens, packed to INT8 beside a head of fewer bits.

Their logits take the place of those that the head itself gives for these tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.formats.architectures import is_tied
from lowbit.formats.errors import FormatError
from lowbit.formats.head_rows import (
    PackedRows,
    RowsFile,
    head_rows_bytes,
    head_rows_size,
    open_head_rows,
)
from lowbit.formats.layout.manifest import MANIFEST_FILE, Manifest
from lowbit.formats.layout.scheme import Scheme

FREQUENT_FOLDER = "frequent"
FREQUENT_FILE = f"{FREQUENT_FOLDER}/head.safetensors"
BITS = 8
AGAIN = "convert or download the folder again"
_FILE = RowsFile(
    name=FREQUENT_FILE,
    bits=BITS,
    version_key="lowbit_frequent_rows",
    version="1",
    hint=AGAIN,
)


def open_frequent_rows(
    folder: Path, config: Mapping[str, Any], manifest: Manifest | None
) -> PackedRows | None:
    """Read the frequent rows of a packed folder, every part checked; None where it has none.

    Args:
        config: config.json of the folder.
        manifest: its lowbit.json; None where it has none, and the file alone decides.

    Raises:
        FormatError: a file that lowbit.json does not state, or the other way round, or with other
            rows; rows of a head that is the embedding; else see `open_head_rows`.
        UnsupportedModelError: see `open_head_rows`.
    """
    rows = open_head_rows(_FILE, folder, config)
    if manifest is not None:
        stated = manifest.frequent_rows
        expected = None if stated is None else (stated.rows, stated.group_size)
        found = None if rows is None else (len(rows.ids), rows.scheme.group_size)
        if found != expected:
            raise FormatError(
                f"`{FREQUENT_FILE}` {_described(found)}, {MANIFEST_FILE} says that it "
                f"{_described(expected)}",
                hint=AGAIN,
            )
    if rows is not None and is_tied(config):
        raise FormatError(
            f"`{FREQUENT_FILE}` has rows of a head, and the model's is its embedding", hint=AGAIN
        )
    return rows


def _described(rows: tuple[int, int | None] | None) -> str:
    if rows is None:
        return "is missing"
    count, group = rows
    return f"has {count} rows in {Scheme(BITS, group)}"


def frequent_rows_size(rows: int, hidden: int, scheme: Scheme) -> int:
    """Bytes of the file of frequent rows."""
    return head_rows_size(_FILE, rows, hidden, scheme)


def frequent_rows_bytes(rows: PackedRows) -> bytes:
    """Content of the file."""
    return head_rows_bytes(_FILE, rows)
