"""Counts of the tokens that a text uses, by which rows of a vocabulary are chosen."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert.texts.calibration import (
    BUNDLED_NAME,
    bundled_texts,
    plain_texts,
    without_bundled,
)
from lowbit.formats.printable import printable
from lowbit.formats.text.tokenizer import TOKENIZER_FILE, TextTokenizer, load_text_tokenizer

BLOCK = 1000  # tokens: every second block is held out to measure the coverage of another text


@dataclass(frozen=True, slots=True)
class CountedText:
    """A text as tokens, to count them."""

    name: str  # of the text
    sha256: str  # of all its documents, one after the other
    ids: Sequence[int]  # its tokens
    # Tokens of the bundled text, which decide where a text of the user's has none; empty where the
    # bundled one is counted itself.
    rest: Sequence[int]

    def by_use(self, first: Sequence[int], vocabulary: int) -> list[int]:
        """All ids below `vocabulary`, most wanted first; see `by_use`."""
        return by_use(first, vocabulary, (Counter(self.ids), Counter(self.rest)))

    def halves(self) -> tuple["CountedText", "CountedText"]:
        """The even blocks of the text, and the odd ones."""
        parts = [self.ids[start : start + BLOCK] for start in range(0, len(self.ids), BLOCK)]
        seen, unseen = (list(chain.from_iterable(parts[first::2])) for first in (0, 1))
        return replace(self, ids=seen), replace(self, ids=unseen)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens chosen for a draft head."""

    ids: Tensor  # [N] int32, ascending
    text: str | None  # name of the text they were counted on; None without a tokenizer, by id alone
    text_sha256: str | None
    tokens: int
    coverage: float  # share of its tokens that are among the ids
    # Share of the tokens in every second block of the text that would be among as many ids counted
    # on the other blocks.
    held_out: float


def choose_vocabulary(
    folder: Path, count: int, vocabulary: int, ends: Sequence[int], file: Path | None
) -> Vocabulary:
    """Choose tokens: those that end an answer and added ones, then by use, then by id.

    Ids of byte-level tokenizers follow the order of merges, and so a wider text than any at hand.
    Tokens that a text of the user's does not have follow the bundled text before their ids decide.

    Args:
        count: tokens to choose, fewer than the vocabulary.
        file: `.txt` or `.jsonl` text; the bundled one where left out.

    Raises:
        RequestError: a text that cannot be read.
        CheckpointError: a tokenizer that fails; with a file also a folder without one.
    """
    if file is None and not (folder / TOKENIZER_FILE).exists():
        chosen = sorted(by_use(ends, vocabulary, ())[:count])
        return Vocabulary(torch.tensor(chosen, dtype=torch.int32), None, None, 0, 0.0, 0.0)
    tokenizer = load_text_tokenizer(folder, "counting tokens")
    text = count_text(tokenizer, vocabulary, file)
    always = [*ends, *tokenizer.hub.get_added_tokens_decoder()]
    chosen = text.by_use(always, vocabulary)[:count]
    seen, unseen = text.halves()
    from_half = seen.by_use(always, vocabulary)[:count]
    return Vocabulary(
        ids=torch.tensor(sorted(chosen), dtype=torch.int32),
        text=text.name,
        text_sha256=text.sha256,
        tokens=len(text.ids),
        coverage=coverage(text.ids, chosen),
        held_out=coverage(unseen.ids, from_half),
    )


def count_text(tokenizer: TextTokenizer, vocabulary: int, file: Path | None) -> CountedText:
    """A text as tokens.

    The bundled text behind the answers in a text of `calib-text` is not counted with them: it
    decides where they do not, as for any other text.

    Args:
        file: `.txt` or `.jsonl` text; the bundled one where left out.

    Raises:
        RequestError: a text that cannot be read.
        CheckpointError: a tokenizer that fails, or gives ids that have no row.
    """
    bundled = bundled_texts()
    documents, name = (bundled, BUNDLED_NAME)
    if file is not None:
        documents, name = plain_texts(file), printable(file.name)
    own = documents if file is None else [without_bundled(each) for each in documents]
    ids = [id for one in tokenizer.encode_all(own) for id in one]
    rest = [] if file is None else [id for one in tokenizer.encode_all(bundled) for id in one]
    tokenizer.check_ids(ids, vocabulary)
    sha256 = hashlib.sha256("".join(documents).encode()).hexdigest()
    return CountedText(name, sha256, ids, rest)


def coverage(tokens: Sequence[int], ids: Sequence[int]) -> float:
    """Share of tokens that are among the ids; 0 without tokens."""
    among = set(ids)
    return sum(token in among for token in tokens) / max(1, len(tokens))


def by_use(first: Sequence[int], vocabulary: int, counts: Sequence[Counter[int]]) -> list[int]:
    """All ids below `vocabulary`: those of `first`, then by each count in turn, then by id."""
    leading = {id for id in first if id < vocabulary}

    def rank(id: int) -> tuple[int, ...]:
        return (id not in leading, *(-one[id] for one in counts), id)

    return sorted(range(vocabulary), key=rank)
