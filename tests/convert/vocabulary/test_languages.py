"""The order of tokens that no text asks for, against what an own count over its front gives."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.convert.vocabulary import languages
from lowbit.convert.vocabulary.languages import (
    LANGUAGE_SHARES,
    LATIN,
    OTHER,
    SCRIPT_SHARES,
    SCRIPTS,
    bundled_words,
    by_script,
    common_tokens,
    merged,
    script_of,
    tokens_of_languages,
)
from lowbit.convert.vocabulary.tokenizer import open_tokenizer
from lowbit.formats.errors import RequestError
from lowbit.formats.text.tokenizer import load_text_tokenizer

MODEL = Path(__file__).parents[3] / "examples/models/tiny-qwen3.5"
ORDERS = st.lists(
    st.tuples(st.sampled_from((0.1, 0.25, 0.5, 1.0)), st.lists(st.integers(0, 60))), max_size=5
)


@pytest.mark.parametrize(
    ("text", "script"),
    [
        (" the", LATIN),
        ("\ufffd", LATIN),
        ("año", LATIN),
        (" привет", "Cyrillic"),
        ("に行く", "Kana"),
        ("的", "Han"),
        ("x = 的", "Han"),
        ("안녕", "Hangul"),
        ("कि", "Devanagari"),
        ("ไม่", "Thai"),
        ("لا", "Arabic"),
        ("και", OTHER),
        ("→", LATIN),
        ("🙂", LATIN),
        ("", LATIN),
    ],
)
def test_a_token_is_of_its_first_script_but_latin(text: str, script: str) -> None:
    assert script_of(text) == script


@given(orders=ORDERS, cut=st.integers(0, 60))
def test_an_order_has_come_as_far_as_its_share(
    orders: list[tuple[float, list[int]]], cut: int
) -> None:
    """At every cut there is one place, up to which each order has its share of it."""
    found = merged(orders)
    assert sorted(found) == sorted({id for _, ids in orders for id in ids})
    front = set(found[:cut])
    reached = []
    for share, ids in orders:
        own = list(dict.fromkeys(ids))
        missing = [rank for rank, id in enumerate(own, start=1) if id not in front]
        reached.append(min(missing) / share if missing else float("inf"))
    last = max(
        (
            min(
                (rank / share)
                for share, ids in orders
                for rank, each in enumerate(dict.fromkeys(ids), start=1)
                if each == id
            )
            for id in front
        ),
        default=0.0,
    )
    assert last <= min(reached, default=float("inf"))


def test_every_token_has_one_place() -> None:
    tokenizer = load_text_tokenizer(MODEL)
    source = open_tokenizer(tokenizer)
    found = common_tokens(source, tokenizer)
    assert sorted(found) == sorted(source.ids - set(source.added.values()))
    assert sorted(id for ids in by_script(source).values() for id in ids) == sorted(found)


def test_all_languages_and_scripts_have_a_share() -> None:
    words = bundled_words()
    assert words.keys() == LANGUAGE_SHARES.keys()
    assert {LATIN, *(name for name, _, _ in SCRIPTS)} == SCRIPT_SHARES.keys()
    apart = {"zh", "zh-TW", "ja", "th"}  # written without spaces: a word a line
    for language, text in words.items():
        each = text.splitlines() if language in apart else text.split()
        assert len(each) > 500
        assert len(set(each)) == len(each)


def test_words_bring_their_tokens_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """By script alone an order of ids; words move what they need before others of their script."""
    monkeypatch.setattr(languages, "bundled_words", bundled_words)  # all of them
    tokenizer = load_text_tokenizer(MODEL)
    source = open_tokenizer(tokenizer)
    place = {id: rank for rank, id in enumerate(common_tokens(source, tokenizer))}
    latin = by_script(source)[LATIN]
    needed = set(tokenizer.encode(bundled_words()["de"])) & set(latin[len(latin) // 2 :])
    others = set(latin[len(latin) // 2 :]) - needed
    assert len(needed) > 20
    assert sum(map(place.__getitem__, needed)) / len(needed) < 0.9 * (
        sum(map(place.__getitem__, others)) / len(others)
    )


def test_unknown_language() -> None:
    with pytest.raises(RequestError, match="language `xx` is not known") as caught:
        tokens_of_languages(["de", "xx"], load_text_tokenizer(MODEL))
    assert "de, el" in str(caught.value.hint)
