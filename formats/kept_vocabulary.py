"""`kept_vocabulary.json`: which tokens of its original a model with a smaller vocabulary has.

Conversions pass the file through, so a packed folder says too that its vocabulary was cut.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowbit.formats.files.reading import read_bytes
from lowbit.formats.layout.records import broken_seal, parse_object, record, sealed, take_seal

KEPT_FILE = "kept_vocabulary.json"
SCHEMA = 1
AGAIN = "cut the vocabulary again"


@dataclass(frozen=True, slots=True)
class TextLength:
    """Tokens of a text."""

    text: str  # title of it
    size_bytes: int  # of it as UTF-8
    tokens_before: int  # by the original's tokenizer
    tokens_after: int  # by the cut one
    # a byte of the text that the original needs; None where it was not measured
    bits_before: float | None
    bits_after: float | None  # the same of the model with the cut vocabulary

    @property
    def per_byte_before(self) -> float:
        """Tokens a byte of the original's tokenizer."""
        return self.tokens_before / self.size_bytes if self.size_bytes else 0.0

    @property
    def per_byte_after(self) -> float:
        """Tokens a byte of the cut one."""
        return self.tokens_after / self.size_bytes if self.size_bytes else 0.0

    @property
    def growth(self) -> float:
        """Share by which the text has more tokens."""
        return self.tokens_after / self.tokens_before - 1 if self.tokens_before else 0.0


@dataclass(frozen=True, slots=True)
class KeptVocabulary:
    """Content of kept_vocabulary.json."""

    lowbit_version: str  # version that cut the vocabulary
    repo: str | None  # Hub id of the original; None for a folder
    commit: str | None  # of the original; None for a folder
    tokenizer_sha256: str  # of the original's tokenizer.json
    source_rows: int  # of the original's embedding
    source_tokens: int  # of the original's tokenizer
    rows: int  # tokens that are kept, each with a row
    text: str  # name of the text that tokens were counted on
    text_sha256: str  # of its content
    text_tokens: int  # of it, by the original's tokenizer
    coverage: float  # share of them that are kept
    held_out: float  # share that would be kept in the half of the text that was left out of a count
    lengths: tuple[TextLength, ...]  # of the evaluation texts
    # the original's id of every token, ascending; its own id is its place here
    ids: tuple[int, ...]

    def summary(self) -> dict[str, Any]:
        """The record without the kept tokens' ids; tokens a byte stand beside the counts."""
        content = {key: value for key, value in asdict(self).items() if key != "ids"}
        per_byte = [
            {
                "tokens_per_byte_before": row.per_byte_before,
                "tokens_per_byte_after": row.per_byte_after,
            }
            for row in self.lengths
        ]
        rows = zip(content["lengths"], per_byte, strict=True)
        return {**content, "lengths": [{**row, **more} for row, more in rows]}

    def to_bytes(self) -> bytes:
        """The file's content, sealed."""
        return (json.dumps({"schema": SCHEMA, **sealed(asdict(self))}) + "\n").encode()


def read_kept_vocabulary(folder: Path) -> KeptVocabulary | None:
    """Read the file of a model folder; None where the vocabulary was not cut.

    Raises:
        CheckpointError: not a regular file, or a link out of the folder or to nothing.
        FormatError: malformed, of a schema this release does not know, or changed since.
    """
    path = folder / KEPT_FILE
    try:
        raw = read_bytes(path)
    except FileNotFoundError:
        return None
    return parse_kept_vocabulary(raw, path)


def parse_kept_vocabulary(raw: bytes, path: Path) -> KeptVocabulary:
    """Read the file's content; `path` names it in messages.

    Raises:
        FormatError: malformed, of a schema this release does not know, or changed since.
    """
    content = parse_object(raw, path, "schema", SCHEMA, AGAIN)
    intact = take_seal(content)
    found = record(KeptVocabulary, content, str(path))
    if not intact:
        raise broken_seal(path, AGAIN)
    return found
