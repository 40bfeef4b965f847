"""The tokens that a smaller vocabulary keeps: those which a text uses most, and all they need."""

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lowbit.convert.texts.token_counts import CountedText, coverage
from lowbit.convert.vocabulary.tokenizer import ByteLevelBpe
from lowbit.formats.errors import QuantizationError, RequestError
from lowbit.formats.files import strict_json
from lowbit.formats.files.user_file import read_user_file
from lowbit.formats.kept_vocabulary import KEPT_FILE, parse_kept_vocabulary
from lowbit.formats.safetensors.hashing import hash_file

ROWS = 128  # a vocabulary is a multiple of: CPU and GPU kernels read 16 rows at once, others 128
CHARACTERS = 1 / 16  # of the tokens, at most
_LIST = f"write it as [0, 17, 4711], or name the {KEPT_FILE} of another cut"


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Tokens that are kept."""

    ids: tuple[int, ...]  # of the original, ascending
    text: str  # name of the text they were counted on
    text_sha256: str  # of the text
    tokens: int  # of the text
    coverage: float  # share of its tokens that are kept
    # Share of the tokens in every second block of the text that would be kept by a count on the
    # other blocks
    held_out: float


def choose_tokens(
    source: ByteLevelBpe,
    text: CountedText,
    keep: int | Path,
    named: AbstractSet[int],
    common: Sequence[int],
    asked: Sequence[int] = (),
) -> KeptTokens:
    """Choose tokens: bytes, added, named and listed ones, those of the text by use, then others.

    The others are those of the languages asked for, those of the bundled text, characters, and
    common ones: a user's text gives up none of its tokens but for the parts that tokens are merged
    from, which need places too.

    Characters are a sixteenth of all tokens at most: a language that neither the text nor the
    common tokens know then costs a token a character, not one a byte, which the model has hardly
    ever seen.

    Args:
        keep: number of tokens; or a file that lists them, see `listed_tokens`. Rounded up to a
            multiple of ROWS by keeping more.
        named: tokens that config.json or generation_config.json names.
        common: all ids but those of added tokens, see `common_tokens`.
        asked: ids that languages need, see `tokens_of_languages`.

    Raises:
        QuantizationError: as many tokens as there are, or fewer than must be kept.
        LowbitError: a file that `listed_tokens` refuses.
    """
    listed = listed_tokens(keep, source) if isinstance(keep, Path) else frozenset()
    first = _with_all_parts(source, named | listed)
    rows = -(-(keep if isinstance(keep, int) else len(first)) // ROWS) * ROWS
    if rows >= len(source.ids):
        raise QuantizationError(
            f"`{source.path}` has {len(source.ids):,} tokens, of which {rows:,} were to be kept",
            hint=f"keep at least {ROWS} fewer",
        )
    if len(first) > rows:
        raise QuantizationError(
            f"{rows:,} tokens are to be kept, but the 256 bytes and the added tokens of "
            f"`{source.path}` are {len(first):,}",
            hint=f"keep {-(-len(first) // ROWS) * ROWS:,} or more",
        )
    chosen = _fill(source, first, _by_preference(source, text, first, asked, common, rows), rows)
    seen, unseen = text.halves()
    from_half = _fill(source, first, _by_preference(source, seen, first, asked, common, rows), rows)
    return KeptTokens(
        ids=tuple(sorted(chosen)),
        text=text.name,
        text_sha256=text.sha256,
        tokens=len(text.ids),
        coverage=coverage(text.ids, list(chosen)),
        held_out=coverage(unseen.ids, list(from_half)),
    )


def listed_tokens(file: Path, source: ByteLevelBpe) -> frozenset[int]:
    """Ids that a file lists: a JSON array of them, or the kept_vocabulary.json of another cut.

    Args:
        file: to read, or a pipe.
        source: the tokenizer whose ids they are.

    Raises:
        RequestError: a file that cannot be read or lists something else than ids of tokens.
        FormatError: a malformed kept_vocabulary.json.
    """
    raw = read_user_file(file, "list of tokens")
    where = f"list of tokens `{file}`"
    try:
        content = strict_json.loads(raw)
    except ValueError as error:  # UnicodeDecodeError too
        raise RequestError(f"{where} is not JSON: {error}", hint=_LIST) from None
    if isinstance(content, dict):
        kept = parse_kept_vocabulary(raw, file)
        if kept.tokenizer_sha256 != hash_file(source.path):
            raise RequestError(
                f"{where} is of another tokenizer than `{source.path}`",
                hint="its ids would mean other tokens: name a number of tokens instead",
            )
        content = list(kept.ids)
    if not isinstance(content, list):
        raise RequestError(f"{where} is not an array", hint=_LIST)
    for id in content:
        if type(id) is not int or id not in source.ids:
            raise RequestError(
                f"{where} holds {id!r:.40}, expected ids of tokens of `{source.path}`", hint=_LIST
            )
    return frozenset(content)


def _with_all_parts(source: ByteLevelBpe, listed: Collection[int]) -> frozenset[int]:
    """Bytes, added tokens and those wanted, with the parts that they are merged from."""
    kept = set(source.always)
    for id in sorted(listed):
        kept |= source.with_parts(id, kept)
    return frozenset(kept)


def _by_preference(
    source: ByteLevelBpe,
    text: CountedText,
    first: Collection[int],
    asked: Sequence[int],
    common: Sequence[int],
    rows: int,
) -> list[int]:
    """All ids: of `first`, of the text by use, `asked`, of the bundled text, characters, common."""
    own, rest = {*first, *text.ids}, set(text.rest)
    by_use = text.by_use(sorted(first), max(source.ids) + 1)
    characters = source.characters[: int(CHARACTERS * rows)]
    order = [id for id in by_use if id in own], asked, [id for id in by_use if id in rest]
    return list(dict.fromkeys(chain(*order, characters, common)))


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
