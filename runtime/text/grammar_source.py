"""Grammars as text: a schema, an expression, a choice or a Lark grammar, within limits of size.

Importing this module needs no llguidance.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.machine.system import install_hint

MOST_BYTES = 256 << 10  # of a schema, a regular expression or a grammar
MOST_WORD = 4096  # bytes of a text that an answer must have; the time for a mask grows with them
MOST_CHOICE = 64 << 10  # bytes of all texts of a choice
MOST_LEVELS = 64  # of objects and lists inside each other in a schema
# Between two parts of a JSON text: nothing, a space, or a line break with its indentation. Without
# a bound a model may write nothing else.
BLANK = r"( |\n[ \t]{0,32})?"
JSON_NOTATION: Final = {"whitespace_pattern": BLANK, "whitespace_flexible": True}
WORDS = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)*/')  # literals of a Lark grammar
LIMITS = {
    "max_lexer_states": 50_000,  # of .4 to 1 kB
    "verbose_errors": False,  # they would quote the answer
}
# The time for a mask may grow with the cube of a grammar's symbols, of which a schema has 4 for a
# property that is required and 8 for another one. A schema can hardly be as ambiguous as a grammar
# that somebody wrote.
# The library searches for ever for the bytes that come next where a repeated terminal may be empty,
# and 5 ms a token where the next one of long texts is known.
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
SCHEMA_LIMITS = LIMITS | {"max_grammar_size": 8000}
OWN_LIMITS = LIMITS | {"max_grammar_size": 2000}
NOTHING_FITS = "NoExtensionBias"  # what the library says where no text fits


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as text, before anybody knows if it can be used."""

    text: str
    what: str  # name of the grammar in messages
    limits: Mapping[str, Any]


def schema_source(schema: Mapping[str, Any]) -> GrammarSource:
    """JSON that a schema allows, its properties in the order of the schema.

    Raises:
        RequestError: no schema, one with keywords that are not implemented, or too large or too
            deep.
        ResourceError: llguidance is not installed.
    """
    what = "the JSON schema"
    if not isinstance(schema, Mapping):
        raise RequestError(f"{what} must be an object, got {type(schema).__name__}")
    _check_schema(schema)
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} is not plain JSON: {error}") from None
    _check_size(text, what)
    notation = JSON_NOTATION | {"lenient": False}
    try:
        grammar = llguidance().LLMatcher.grammar_from_json_schema(text, None, notation)
    except ValueError as error:
        raise RequestError(f"{what} cannot be used: {reason_of(str(error))}") from None
    return GrammarSource(grammar, what, SCHEMA_LIMITS)


def regex_source(pattern: str) -> GrammarSource:
    """Text that a regular expression matches from its first character to its last.

    Raises:
        RequestError: too large an expression.
        ResourceError: llguidance is not installed.
    """
    what = "the regular expression"
    _check_size(pattern, what, MOST_WORD)
    return GrammarSource(llguidance().LLMatcher.grammar_from_regex(pattern), what, OWN_LIMITS)


def choice_source(texts: Sequence[str]) -> GrammarSource:
    """One of several texts.

    Raises:
        RequestError: the texts are too long in all, or no Unicode.
        ResourceError: llguidance is not installed.
    """
    what, joined = "the choice", "".join(texts)
    _check_size(joined, what, MOST_CHOICE)
    grammar = f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, texts))}"
    if len(joined) > MOST_WORD:
        grammar += NO_FORCING
    return GrammarSource(llguidance().LLMatcher.grammar_from_lark(grammar), what, OWN_LIMITS)


def lark_source(text: str, limits: Mapping[str, Any] = OWN_LIMITS) -> GrammarSource:
    """Text of a context-free grammar in llguidance's variant of Lark.

    There `<name>` is the added token of that name, such as `<think>`.

    Args:
        limits: limits of the library; `SCHEMA_LIMITS` where lowbit wrote the rules itself.

    Raises:
        RequestError: too large a grammar.
        ResourceError: llguidance is not installed.
    """
    what = "the grammar"
    _check_size(text, what)
    for word in WORDS.findall(text):
        _check_size(word, f"a text in {what}", MOST_WORD)
    if limits is OWN_LIMITS:
        text += NO_FORCING
    return GrammarSource(llguidance().LLMatcher.grammar_from_lark(text), what, limits)


def llguidance() -> Any:
    """The library.

    Raises:
        ResourceError: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ResourceError(
            f"grammars need llguidance: {error}", hint=install_hint("serve")
        ) from None
    return llguidance


def _check_size(text: str, what: str, most: int = MOST_BYTES) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{what} must be text, got {type(text).__name__}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is not valid Unicode: {error}") from None
    if size > most:
        raise RequestError(f"{what} has {size} bytes, the most are {most}")


def _check_schema(schema: Mapping[str, Any]) -> None:
    """Refuse what is nested too deeply, forces too long a text, or has a number out of range."""
    level: list[object] = [schema]
    for _ in range(MOST_LEVELS):
        inner: list[object] = []
        for each in level:
            if isinstance(each, Mapping):
                inner.extend(each.values())
                _check_numbers(each)
                _check_words([*each, each.get("const"), each.get("pattern"), *_listed(each)])
            elif isinstance(each, list | tuple):
                inner.extend(each)
        if not inner:
            return
        level = inner
    raise RequestError(f"the JSON schema has more than {MOST_LEVELS} levels")


def _check_numbers(schema: Mapping[str, Any]) -> None:
    """Refuse numbers that no JSON reader takes: those beyond 1.8e308, and NaN."""
    for name, value in schema.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not _is_finite(number):
                raise RequestError(f"`{name}` in the JSON schema is not a number below 1.8e308")


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # of an integer
        return False


def _listed(schema: Mapping[str, Any]) -> list[object]:
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def _check_words(words: list[object]) -> None:
    for word in words:
        if isinstance(word, str):
            _check_size(word, "a text in the JSON schema", MOST_WORD)


def reason_of(message: str) -> str:
    """The lines of a library's message that say what is wrong, without names of its own code."""
    lines = [
        line.strip() for line in message.replace("Expected f64", "Expected number").splitlines()
    ]
    if lines[:1] == [NOTHING_FITS]:
        return "no text fits: a rule only leads back to itself, or a class of characters is empty"
    said = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([lines[0].rstrip(":") if lines else "no reason is known", *said])
