"""Strict tools in the XML form: what the schema allows of a text, and refusals by name."""

import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.errors import RequestError
from lowbit.runtime.text.answer import AnswerSplitter
from lowbit.runtime.text.call_grammar import grammar_of
from lowbit.runtime.text.tokenizer import Tokenizer, load_tokenizer
from lowbit.runtime.text.tools import read_tools
from lowbit.runtime.text.xml_values import FORMATS, MOST_STEPS, UnknownPatternError, whole_text
from tests.runtime.text.answers import joined
from tests.runtime.text.templates import BUNDLED, tool

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
COLOR = {"Color": {"enum": ["red", "dark blue"], "title": "Color", "type": "string"}}
NULL = {"type": "null"}
LIST = {"type": "array", "items": {"type": "integer"}}


@cache
def tokens() -> Any:
    return llguidance.LLTokenizer((BUNDLED / "tokenizer.json").read_text())


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(BUNDLED)


def strict(schema: Any, strict: bool = True, **root: Any) -> dict[str, Any]:
    """A tool with one argument `x`."""
    made = tool("f", x=schema)
    made["function"]["parameters"] |= {"$defs": COLOR, **root}
    made["function"]["strict"] = strict
    return made


def matcher(made: dict[str, Any]) -> Any:
    lark = grammar_of("xml", read_tools([made]), "required", tokenizer())
    found = llguidance.LLMatcher(
        tokens(), llguidance.LLMatcher.grammar_from_lark(lark), log_level=0
    )
    assert not found.is_error(), found.get_error()
    return found


def answer(value: str) -> str:
    parameter = f"<parameter=x>\n{value}\n</parameter>"
    return f"<tool_call>\n<function=f>\n{parameter}\n</function>\n</tool_call>"


def allows(grammar: Any, value: str) -> bool:
    ids, grammar = tokens().tokenize_str(answer(value)), grammar.deep_copy()
    return bool(grammar.try_consume_tokens(ids) == len(ids) and grammar.is_accepting())


def parsed(made: dict[str, Any], value: str) -> Any:
    splitter = AnswerSplitter(tokenizer(), "answer", (), read_tools([made]), "xml")
    events = [event for id in tokenizer().encode(answer(value)) for event in splitter.push(id)]
    _, _, [(_, arguments)] = joined(events + splitter.finish())
    return json.loads(arguments)["x"]


VALUES = [
    *("red", "dark blue", "blue", "", "null", "None", "true", "False", "5", "-7.0", "5.5", "77"),
    *("[1, 2]", "[a]", '{"a": 1}', "ab", "abc-12", "abcdef", "é😀x", "a\nb", "\n", "</parameter>"),
    *("2024-02-29", "2023-02-29", "a@b.org", "red\n", " red", "1", "12 apples", "[draft] x"),
]


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"$ref": "#/$defs/Color"}, ["red", "dark blue"]),
        ({"$ref": "#/$defs/Color", "description": "d", "default": "red"}, ["red"]),
        ({"allOf": [{"$ref": "#/$defs/Color"}]}, ["red"]),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, NULL], "default": None}, ["red", "null", "None"]),
        ({"enum": ["red", None]}, ["red", "null"]),
        ({"enum": ["red", 5, True]}, ["red", "5", "true"]),
        ({"type": ["string", "null"], "enum": ["red", None]}, ["red", "null"]),
        ({"type": "string", "enum": ["red", "ab"], "maxLength": 2}, ["ab"]),
        ({"const": "a\nb"}, ["a\nb"]),
        ({"type": "string", "nullable": True, "maxLength": 3}, ["red", "null", "", "é😀x"]),
        ({"type": "string", "minLength": 3, "maxLength": 3}, ["red", "é😀x", "a\nb"]),
        ({"type": "string", "minLength": 6}, ["abcdef", "12 apples"]),
        ({"type": "string", "maxLength": 0}, [""]),
        ({"type": "string", "pattern": "^[a-c]+-\\d{2}$"}, ["abc-12"]),
        ({"type": "string", "pattern": "b"}, ["ab", "blue", "a\nb", "abcdef"]),
        ({"type": "string", "pattern": "^a|f$", "minLength": 4}, ["abc-12", "abcdef"]),
        ({"pattern": "^r"}, ["red"]),
        ({"type": "string", "format": "date"}, ["2024-02-29"]),
        ({"type": "string", "format": "email"}, ["a@b.org"]),
        ({"anyOf": [{"type": "string", "maxLength": 3}, LIST]}, ["red", "[1, 2]"]),
        ({"anyOf": [{"type": "string"}, LIST, NULL]}, ["12 apples", "[1, 2]", "null"]),
        ({"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "integer"}]}, ["ab", "5", "77"]),
        ({"oneOf": [{"type": "string", "maxLength": 1}, {"type": "boolean"}]}, ["", "true"]),
        ({"oneOf": [{"enum": ["red"]}, {"const": "ab"}]}, ["red", "ab"]),
        ({"anyOf": [{"type": "string"}, {"enum": [5]}]}, ["5", "12 apples"]),
        ({"type": "string"}, ["red", "5", "", "\n", "[1, 2]"]),
        ({}, ["red", "5", "[1, 2]", '{"a": 1}']),
    ],
    ids=str,
)
def test_every_text_that_is_allowed_has_a_value_that_the_schema_allows(
    schema: Any, good: list[str]
) -> None:
    made = strict(schema)
    grammar = matcher(made)
    root = {"$defs": COLOR, **schema} if not schema.get("nullable") else {}
    for value in VALUES:
        if allows(grammar, value):
            check = jsonschema.Draft202012Validator(root, format_checker=jsonschema.FormatChecker())
            assert check.is_valid(parsed(made, value)), value
    for value in good:
        assert allows(grammar, value), value
    assert not allows(grammar, "a</parameter>\n</parameter>")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "format": "ipv6"}, "format: ipv6"),
        ({"type": "string", "pattern": "a(?=b)"}, "pattern: a(?=b)"),
        ({"type": "string", "pattern": r"\bword"}, "pattern"),
        ({"type": "string", "pattern": "(a|^b)c"}, "pattern"),
        ({"type": "string", "pattern": "("}, "pattern"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "string", "maxLength": 1.5}, "maxLength"),
        ({"type": "string", "not": {"const": "x"}}, "not"),
        ({"type": "string", "enum": ["a"], "pattern": "b"}, "pattern` beside `enum"),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, "minimum"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf"),
        ({"$ref": "#/$defs/none"}, "$ref"),
        ({"type": "string", "anyOf": [{"type": "integer"}]}, "type"),
        ({"enum": ["</parameter>"]}, "enum"),
        ({"anyOf": [{"enum": ["5"]}, {"enum": [7]}]}, "enum"),
    ],
    ids=str,
)
def test_what_cannot_be_held_is_refused_by_name(schema: Any, keyword: str) -> None:
    with pytest.raises(RequestError) as refused:
        matcher(strict(schema))
    assert str(refused.value).startswith(f"tool `f`: `x` has `{keyword}")
    assert allows(matcher(strict(schema, strict=False)), "12 apples")


@pytest.mark.parametrize(
    ("root", "where"),
    [
        ({"minProperties": 2}, "the arguments has `minProperties"),
        ({"anyOf": [{"required": ["x"]}]}, "the arguments has `anyOf"),
        ({"required": ["x", "y"]}, "`y` has `required"),
    ],
    ids=str,
)
def test_limits_of_all_arguments_are_refused(root: Any, where: str) -> None:
    with pytest.raises(RequestError) as refused:
        matcher(strict({"type": "string"}, **root))
    assert str(refused.value).startswith(f"tool `f`: {where}")
    assert matcher(strict({"type": "string"}, strict=False, **root))


def test_arguments_that_are_not_listed_follow_their_schema() -> None:
    made = strict({})
    made["function"]["parameters"] = {"additionalProperties": {"type": "string", "maxLength": 2}}
    assert allows(matcher(made), "ab")
    assert not allows(matcher(made), "abc")


def test_alternatives_that_multiply_are_refused() -> None:
    chain = {f"d{n}": {"anyOf": [{"$ref": f"#/definitions/d{n + 1}"}] * 30} for n in range(12)}
    ends: tuple[Any, ...] = ({"type": "string"}, False, {"anyOf": []})
    for end in ends:
        with pytest.raises(RequestError, match="too many alternatives"):
            matcher(strict({"$ref": "#/definitions/d0"}, definitions={**chain, "d12": end}))
    loop = {"anyOf": [{"$ref": "#/definitions/loop"}] * 30}
    with pytest.raises(RequestError, match="has `\\$ref`"):
        matcher(strict({"$ref": "#/definitions/loop"}, definitions={"loop": loop}))
    with pytest.raises(RequestError, match="too many alternatives"):
        matcher(strict({"enum": [str(n) for n in range(MOST_STEPS)]}))


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    good = {
        "date": "2023-12-31",
        "time": "23:59:59.5+01:00",
        "date-time": "2000-02-29T00:00:00Z",
        "uuid": "12345678-1234-abcd-ABCD-1234567890ab",
        "ipv4": "255.0.10.1",
        "hostname": "a-b.example",
        "email": "a.b+c@example.org",
        "uri": "https://example.org:80/a%20b?c=d#e",
    }
    bad = {
        "date": "1900-02-29",
        "time": "24:00:00Z",
        "date-time": "2000-02-29 00:00:00",
        "uuid": "12345678-1234-abcd-ABCD-1234567890a",
        "ipv4": "256.0.0.1",
        "hostname": "-a",
        "email": "a@",
        "uri": "example org",
    }
    grammar = matcher(strict({"type": "string", "format": name}))
    assert allows(grammar, good[name])
    assert not allows(grammar, bad[name])


texts = st.lists(st.sampled_from(["a", "b", "1", "-", "/", "\n", "é", "_", "٣"]), max_size=6)
patterns = st.sampled_from(
    ["^a", "b$", "^a+b?$", r"\d", r"^\w+$", "[^a]b", "a|^b", "^(a|1)*$", r"^[\d_]+$", "a/b", r"\/"]
)


@given(pattern=patterns, parts=texts)
def test_patterns_are_those_of_json_schemas(pattern: str, parts: list[str]) -> None:
    text = "".join(parts)
    expected = re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None
    assert (re.fullmatch(whole_text(pattern), text) is not None) == expected


def test_patterns_that_no_grammar_follows() -> None:
    for pattern in ("(?=a)", "(?!a)b", "(?<=a)b", r"(a)\1", r"\bx", "a^", "$a", "(?i)a", r"\u0041"):
        with pytest.raises(UnknownPatternError):
            whole_text(pattern)
