"""The tokens that a smaller vocabulary keeps: those which a text uses most, and all they need."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lowbit.convert.original.token_counts import CountedText, coverage
from lowbit.convert.vocabulary.tokenizer import ByteLevelBpe
from lowbit.formats.errors import QuantizationError

ROWS = 128  # a vocabulary is a multiple of: CPU and GPU kernels read 16 rows at once, others 128


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Tokens that are kept.

    Attributes:
        ids: of the original, ascending.
        text: name of the text they were counted on.
        text_sha256: of the text.
        tokens: of the text.
        coverage: share of its tokens that are kept.
        held_out: share of the tokens in every second block of the text that would be kept by a
            count on the other blocks.
    """

    ids: tuple[int, ...]
    text: str
    text_sha256: str
    tokens: int
    coverage: float
    held_out: float


def choose_tokens(
    source: ByteLevelBpe, text: CountedText, count: int, named: Collection[int]
) -> KeptTokens:
    """Choose tokens: bytes, added and named ones, then by use, then by id.

    Ids of byte-level tokenizers follow the order of merges, and so a wider text than any at hand.

    Args:
        source: the original tokenizer.
        text: to count tokens on.
        count: tokens to keep; rounded up to a multiple of ROWS by keeping more.
        named: tokens that config.json or generation_config.json names.

    Raises:
        QuantizationError: as many tokens as there are, or fewer than must be kept.
    """
    rows = -(-count // ROWS) * ROWS
    if rows >= len(source.ids):
        raise QuantizationError(
            f"`{source.path}` has {len(source.ids):,} tokens, of which {rows:,} were to be kept",
            hint=f"keep at least {ROWS} fewer",
        )
    first = always_kept(source, named)
    if len(first) > rows:
        raise QuantizationError(
            f"{rows:,} tokens are to be kept, but the 256 bytes and the added tokens of "
            f"`{source.path}` are {len(first):,}",
            hint=f"keep {-(-len(first) // ROWS) * ROWS:,} or more",
        )
    chosen = _fill(source, first, text.by_use(sorted(first), max(source.ids) + 1), rows)
    seen, unseen = text.halves()
    from_half = _fill(source, first, seen.by_use(sorted(first), max(source.ids) + 1), rows)
    return KeptTokens(
        ids=tuple(sorted(chosen)),
        text=text.name,
        text_sha256=text.sha256,
        tokens=len(text.ids),
        coverage=coverage(text.ids, list(chosen)),
        held_out=coverage(unseen.ids, list(from_half)),
    )


def always_kept(source: ByteLevelBpe, named: Collection[int]) -> frozenset[int]:
    """Bytes, added tokens, and those that the model's files name, with their parts."""
    kept = set(source.always)
    for id in sorted(named):
        kept |= source.with_parts(id, kept)
    return frozenset(kept)


def _fill(
    source: ByteLevelBpe, first: Collection[int], order: Sequence[int], rows: int
) -> set[int]:
    """Exactly `rows` tokens: `first`, then others in order where their parts find room.

    The shortest token left needs no others, so that every pass over the order adds one.
    """
    kept = set(first)
    order = [id for id in order if id in source.ids]
    while len(kept) < rows:
        for id in order:
            needed = source.with_parts(id, kept)
            if len(kept) + len(needed) <= rows:
                kept |= needed
    return kept
