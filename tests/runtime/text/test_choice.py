"""Grammars of a choice: one of the texts, whatever they hold, and at any size up to the limit."""

import json
import random

import pytest

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.text.grammar import Grammar, Grammars
from lowbit.runtime.text.grammar_source import MOST_CHOICE
from tests.runtime.text.test_grammar import ids_of
from tests.short_models import Shorten

HOSTILE = [
    *(
        '"',
        "\\",
        '\\"',
        "/",
        "#",
        "|",
        "\n",
        "\r\n",
        "\x00",
        "\x7f",
        "\u2028",
        "\ufeff",
        "ä",
        "😀",
        " ",
    ),
    *("a|b", "(", "[", "start: x", "CHOICE", "%json {}", "</s>", "a\\u0041"),
]


@pytest.fixture(scope="module")
def model(shorten: Shorten) -> lowbit.Model:
    return lowbit.load(shorten("tiny-qwen3"), device="cpu", context=16)


@pytest.fixture(scope="module")
def grammars(model: lowbit.Model) -> Grammars:
    return model.grammars


def follow(model: lowbit.Model, grammar: Grammar, text: str, drawn: random.Random) -> None:
    """Spell a text by tokens that the masks allow, drawn at random, to a stop token."""
    left, constraint = text.encode(), grammar.constraint()
    while left:
        fits = [
            id
            for id in ids_of(constraint.mask())
            if id not in model.stop_ids and left.startswith(model.tokenizer.token_bytes(id))
        ]
        token = drawn.choice(fits)
        constraint.accept(token)
        left = left[len(model.tokenizer.token_bytes(token)) :]
    assert model.stop_ids & set(ids_of(constraint.mask()))


@pytest.mark.parametrize("texts", [HOSTILE, ["yes", "yes, sir", "no"], ["", "a"], [""]], ids=len)
def test_every_text_of_a_choice_can_be_spelled(model: lowbit.Model, texts: list[str]) -> None:
    drawn = random.Random(1)
    grammar = model.grammars.choice(texts)
    for text in texts:
        follow(model, grammar, text, drawn)


def test_tokens_of_a_choice_are_those_that_a_text_goes_on_with(model: lowbit.Model) -> None:
    texts = ["yes", "yes, sir", "no"]
    ids = ids_of(model.grammars.choice(texts).constraint().mask())
    found = {model.tokenizer.token_bytes(id).decode() for id in ids}
    assert {"y", "n"} <= found
    assert all(any(text.startswith(piece) for text in texts) for piece in found)


@pytest.mark.parametrize(
    "texts", [["x" * MOST_CHOICE], ["ab" * 128] * 256, [f"{n:016}" for n in range(4096)]], ids=len
)
def test_a_choice_of_64_kilobytes_is_taken(model: lowbit.Model, texts: list[str]) -> None:
    assert sum(map(len, texts)) == MOST_CHOICE
    constraint = model.grammars.choice(texts).constraint()
    for id in model.tokenizer.encode(texts[-1], framed=False)[:200]:
        assert id in ids_of(constraint.mask())
        constraint.accept(id)


def test_the_next_tokens_of_a_short_choice_are_known(model: lowbit.Model) -> None:
    constraint = model.grammars.choice(["a long answer", "none"]).constraint()
    [first] = model.tokenizer.encode("a l", framed=False)[:1]
    constraint.accept(first)
    assert constraint.forced(20)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["x" * MOST_CHOICE, "y"], "the choice has 65537 bytes, the most are 65536"),
        (["ä" * (MOST_CHOICE // 2), "y"], "65537 bytes"),
        (["\ud800"], "the choice is not valid Unicode"),
    ],
    ids=str,
)
def test_bad_choices(grammars: Grammars, texts: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        grammars.choice(texts)


NOTHING = "cannot be used: no text fits"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
    ids=json.dumps,
)
def test_schemas_that_no_text_fits(grammars: Grammars, schema: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=f"the JSON schema {NOTHING}"):
        grammars.json_schema(schema)


@pytest.mark.parametrize("pattern", [r"[^\s\S]", "[a&&b]", r"x[^\x00-\U0010FFFF]"])
def test_expressions_that_no_text_fits(grammars: Grammars, pattern: str) -> None:
    with pytest.raises(RequestError, match=f"the regular expression {NOTHING}"):
        grammars.regex(pattern)
    with pytest.raises(RequestError, match=f"the grammar {NOTHING}"):
        grammars.lark(f"start: /{pattern}/")


def test_numbers_of_a_schema_are_called_so(grammars: Grammars) -> None:
    with pytest.raises(RequestError, match="Expected number for 'minimum', got \"a\""):
        grammars.json_schema({"minimum": "a"})
