"""The order in which tokens are kept that no text asks for: what languages and code need most.

Several orders are merged at fixed shares: the tokens of each script by id, and those of the most
used words of 26 languages. Byte-level tokenizers number tokens by their merges. Within a script
this is the order of a far wider text than could be bundled. Across scripts it is not: in Qwen's,
the first 95,000 ids are English and code for the most part, and nearly all Chinese comes after. A
script of many languages needs the words: by id alone Spanish would share the places of Latin
letters with English and code.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from lowbit.convert.vocabulary.tokenizer import ByteLevelBpe
from lowbit.formats.errors import RequestError
from lowbit.formats.text.tokenizer import TextTokenizer

LATIN = "Latin"  # and code, digits, punctuation, symbols, and parts of characters
OTHER = "others"
# First and last code points of scripts, in Unicode's order.
SCRIPTS = (
    ("Cyrillic", 0x400, 0x52F),
    ("Arabic", 0x600, 0x6FF),
    ("Devanagari", 0x900, 0x97F),
    ("Thai", 0xE00, 0xE7F),
    ("Kana", 0x3040, 0x30FF),
    ("Han", 0x3400, 0x9FFF),
    ("Hangul", 0xAC00, 0xD7AF),
    (OTHER, 0x370, 0x1DFF),
    (OTHER, 0x2C00, 0xABFF),
)
FIRST = min(first for _, first, _ in SCRIPTS)
# Tokens of an order, relative to those of the others, wherever the merged order is cut; a token may
# be of several. Chosen by bytes a token of texts in 13 languages and of code in three; figures are
# in BENCHMARKS.md.
SCRIPT_SHARES = {
    LATIN: 0.8,
    "Han": 0.15,
    "Arabic": 0.05,
    "Hangul": 0.04,
    "Cyrillic": 0.035,
    "Kana": 0.015,
    "Thai": 0.012,
    "Devanagari": 0.008,
    OTHER: 0.008,
}
LANGUAGE_SHARES = {
    **dict.fromkeys(("de", "es", "fr", "pt"), 0.035),
    **dict.fromkeys(("ja", "ko", "ru", "zh", "zh-TW"), 0.025),
    **dict.fromkeys(("ar", "cs", "fi", "hi", "hu", "id", "it", "nl", "pl", "ro", "sv"), 0.02),
    **dict.fromkeys(("el", "fa", "th", "tr", "uk", "vi"), 0.01),
}


def bundled_words() -> dict[str, str]:
    """The most used words of each language, most used first, as its sentences separate words."""
    words: dict[str, str] = {}
    path = Path(__file__).with_name("data") / "words.txt"
    for part in path.read_text(encoding="utf-8").split("[")[1:]:
        language, _, text = part.partition("]\n")
        words[language] = text
    return words


def common_tokens(source: ByteLevelBpe, tokenizer: TextTokenizer) -> list[int]:
    """Ids of all tokens but added ones, those that languages and code need most first."""
    words = bundled_words()
    encoded = tokenizer.encode_all(list(words.values()))
    orders = [
        *((SCRIPT_SHARES[script], ids) for script, ids in by_script(source).items()),
        *((LANGUAGE_SHARES[name], ids) for name, ids in zip(words, encoded, strict=True)),
    ]
    return [id for id in merged(orders) if id in source.written]


def tokens_of_languages(languages: Sequence[str], tokenizer: TextTokenizer) -> list[int]:
    """Ids that the most used words of languages need, most wanted first, each language as often.

    Args:
        languages: codes of LANGUAGE_SHARES; empty for none.

    Raises:
        RequestError: a language whose words are not bundled.
    """
    words = bundled_words()
    if unknown := sorted({*languages} - words.keys()):
        raise RequestError(
            f"language `{unknown[0]}` is not known", hint=f"known: {', '.join(sorted(words))}"
        )
    encoded = tokenizer.encode_all([words[language] for language in languages])
    return merged([(1.0, ids) for ids in encoded])


def by_script(source: ByteLevelBpe) -> Mapping[str, Sequence[int]]:
    """Ids of each script's tokens, ascending."""
    ids_by_script: dict[str, list[int]] = {}
    for id, text in sorted(source.written.items()):
        ids_by_script.setdefault(script_of(text), []).append(id)
    return ids_by_script


def script_of(text: str) -> str:
    """Script of the first character that is of another script than Latin; else LATIN."""
    for code in map(ord, text):
        if code >= FIRST:
            for name, first, last in SCRIPTS:
                if first <= code <= last:
                    return name
    return LATIN


def merged(orders: Sequence[tuple[float, Sequence[int]]]) -> list[int]:
    """Ids of several orders in one: wherever it is cut, an order has come as far as its share.

    Args:
        orders: share, and ids without or with repetitions.
    """
    position: dict[int, float] = {}
    for share, ids in orders:
        for rank, id in enumerate(dict.fromkeys(ids), start=1):
            position[id] = min(rank / share, position.get(id, math.inf))
    return sorted(position, key=lambda id: (position[id], id))
