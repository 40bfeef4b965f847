"""The tokens that a draft head is made of: those which a text uses most."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert.original.calibration_text import (
    BUNDLED_NAME,
    bundled_texts,
    plain_texts,
)
from lowbit.formats.printable import printable
from lowbit.formats.text.tokenizer import TOKENIZER_FILE, load_text_tokenizer

BLOCK = 1000  # tokens: every second block is held out to measure the coverage of another text


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens chosen for a draft head.

    Attributes:
        ids: [N] int32, ascending.
        text: name of the text they were counted on; None without a tokenizer, by id alone.
        text_sha256: of the text.
        tokens: of the text.
        coverage: share of its tokens that are among the ids.
        held_out: share of the tokens in every second block of the text that would be among as many
            ids counted on the other blocks.
    """

    ids: Tensor
    text: str | None
    text_sha256: str | None
    tokens: int
    coverage: float
    held_out: float


def choose_vocabulary(
    folder: Path, count: int, vocabulary: int, ends: Sequence[int], file: Path | None
) -> Vocabulary:
    """Choose tokens: those that end an answer and added ones, then by use, then by id.

    Ids of byte-level tokenizers follow the order of merges, and so a wider text than any at hand.
    Tokens that a text of the user's does not have follow the bundled text before their ids decide.

    Args:
        folder: of the original.
        count: tokens to choose, fewer than the vocabulary.
        vocabulary: rows of the head.
        ends: tokens that end an answer.
        file: `.txt` or `.jsonl` text; the bundled one where left out.

    Raises:
        RequestError: a text that cannot be read.
        CheckpointError: a tokenizer that fails; with a file also a folder without one.
    """
    if file is None and not (folder / TOKENIZER_FILE).exists():
        first = _most_used(count, vocabulary, ends, ())
        return Vocabulary(torch.tensor(first, dtype=torch.int32), None, None, 0, 0.0, 0.0)
    tokenizer = load_text_tokenizer(folder, "counting tokens")
    bundled = bundled_texts()
    documents, name = (bundled, BUNDLED_NAME)
    if file is not None:
        documents, name = plain_texts(file), printable(file.name)
    ids = [id for one in tokenizer.encode_all(documents) for id in one]
    rest = [] if file is None else [id for one in tokenizer.encode_all(bundled) for id in one]
    tokenizer.check_ids(ids, vocabulary)
    always = [*ends, *tokenizer.hub.get_added_tokens_decoder()]
    chosen = _most_used(count, vocabulary, always, (Counter(ids), Counter(rest)))
    seen, unseen = _halves(ids)
    from_half = _most_used(count, vocabulary, always, (Counter(seen), Counter(rest)))
    return Vocabulary(
        ids=torch.tensor(chosen, dtype=torch.int32),
        text=name,
        text_sha256=hashlib.sha256("".join(documents).encode()).hexdigest(),
        tokens=len(ids),
        coverage=coverage(ids, chosen),
        held_out=coverage(unseen, from_half),
    )


def coverage(tokens: Sequence[int], ids: Sequence[int]) -> float:
    """Share of tokens that are among the ids; 0 without tokens."""
    among = set(ids)
    return sum(token in among for token in tokens) / max(1, len(tokens))


def _most_used(
    count: int, vocabulary: int, always: Sequence[int], counts: Sequence[Counter[int]]
) -> list[int]:
    """The first `count` ids in the order of preference, ascending."""
    first = {id for id in always if id < vocabulary}

    def rank(id: int) -> tuple[int, ...]:
        return (id not in first, *(-one[id] for one in counts), id)

    return sorted(sorted(range(vocabulary), key=rank)[:count])


def _halves(ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens of even and of odd blocks."""
    halves: tuple[list[int], list[int]] = ([], [])
    for number, start in enumerate(range(0, len(ids), BLOCK)):
        halves[number % 2].extend(ids[start : start + BLOCK])
    return halves
