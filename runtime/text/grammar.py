"""Grammars that an answer must follow, by llguidance (the `serve` extra).

A grammar knows, behind any beginning of an answer, every token of the vocabulary that may come
next. Importing this module needs no llguidance.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.errors import RequestError, ResourceError
from lowbit.runtime.text.tokenizer import Tokenizer

HINT = "pip install '.[serve]' in the clone of lowbit"
MOST_BYTES = 256 << 10  # of a schema, a regular expression or a grammar
MOST_WORD = 4096  # bytes of a text that an answer must have; the time for a mask grows with them
MOST_LEVELS = 64  # of objects and lists inside each other in a schema
# Whitespace between two parts of a JSON text; without a bound a model may write nothing else.
BLANK = r"[ \n\r\t]{0,64}"
WORDS = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)*/')  # literals of a Lark grammar
LIMITS = {
    "max_lexer_states": 50_000,  # of 1 to 2 kB
    "verbose_errors": False,  # they would quote the answer
}


class GrammarConstraint:
    """Follows one answer; a stop id may come where the grammar is complete."""

    def __init__(self, matcher: Any, words: int) -> None:
        """Nothing is written yet.

        Args:
            matcher: an `LLMatcher`, of this answer alone.
            words: of a mask.
        """
        self._matcher = matcher
        self._words = torch.zeros(words, dtype=torch.int32)

    @property
    def done(self) -> bool:
        """Never: it limits the last token too."""
        return False

    @property
    def unbound(self) -> int:
        """None: the next token has a mask."""
        return 0

    def mask(self) -> Tensor:
        """Tokens that may come next; see `Constraint`."""
        self._matcher.unsafe_compute_mask_ptr(self._words.data_ptr(), self._words.nbytes)
        self._check()
        return self._words

    def accept(self, token: int) -> None:
        """Go on behind a token; see `Constraint`."""
        self._matcher.consume_token(token)
        self._check()

    def copy(self) -> "GrammarConstraint":
        """Another one in the same state; takes microseconds."""
        return GrammarConstraint(self._matcher.deep_copy(), len(self._words))

    def forced(self, most: int) -> Sequence[int]:
        """Tokens whose text the grammar allows alone, cut as the tokenizer cuts it."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        return tokens[:most]

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _first(self._matcher.get_error())
            raise RequestError(f"the grammar cannot be followed any further: {reason}")


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A grammar that is ready for any number of answers."""

    _matcher: Any
    _words: int

    def constraint(self) -> GrammarConstraint:
        """The constraint of one answer."""
        return GrammarConstraint(self._matcher.deep_copy(), self._words)


class Grammars:
    """Makes grammars over the tokens of one model; from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Collection[int]) -> None:
        """Tokens are prepared, within a second, when the first grammar is asked for.

        Args:
            tokenizer: of the model.
            vocab_size: V, tokens that can be chosen.
            stop_ids: tokens that end an answer.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._stop_ids = sorted(id for id in stop_ids if id < vocab_size)
        self._lock = Lock()

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON that a schema allows, its properties in the order of the schema.

        Raises:
            RequestError: no schema, one with keywords that are not implemented, or too large.
            ResourceError: llguidance is not installed.
        """
        what = "the JSON schema"
        if not isinstance(schema, Mapping):
            raise RequestError(f"{what} must be an object, got {type(schema).__name__}")
        _check_schema(schema)
        try:
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RequestError(f"{what} is not plain JSON: {error}") from None
        _check_size(text, what)
        library = _llguidance().LLMatcher
        overrides = {"whitespace_pattern": BLANK, "whitespace_flexible": True, "lenient": False}
        return self._made(library.grammar_from_json_schema(text, None, overrides), what)

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Grammar:
        """Text that a regular expression matches from its first character to its last.

        Raises:
            RequestError: no such expression, or too large a one.
            ResourceError: llguidance is not installed.
        """
        what = "the regular expression"
        _check_size(pattern, what, MOST_WORD)
        return self._made(_llguidance().LLMatcher.grammar_from_regex(pattern), what)

    def lark(self, text: str) -> Grammar:
        """Text of a context-free grammar in llguidance's variant of Lark.

        There `<name>` is the added token of that name, such as `<think>`.

        Raises:
            RequestError: no such grammar, or too large a one.
            ResourceError: llguidance is not installed.
        """
        what = "the grammar"
        _check_size(text, what)
        for word in WORDS.findall(text):
            _check_size(word, f"a text in {what}", MOST_WORD)
        return self._made(_llguidance().LLMatcher.grammar_from_lark(text), what)

    def _made(self, grammar: str, what: str) -> Grammar:
        library = _llguidance()
        with self._lock:
            tokens = self._tokens
        limits = library.LLParserLimits(**LIMITS)
        matcher = library.LLMatcher(tokens, grammar, log_level=0, limits=limits)
        first = matcher.deep_copy()
        first.compute_bitmask()  # finds what only shows when it is used
        if first.is_error():
            raise RequestError(f"{what} cannot be used: {_first(first.get_error())}")
        return Grammar(matcher, -(-self._vocab_size // 32))

    @cached_property
    def _tokens(self) -> Any:
        """The library's view of the tokenizer."""
        if not self._stop_ids:
            raise RequestError("the model has no stop token, so no grammar can end its answers")
        view = _Tokens(self._tokenizer, self._vocab_size, self._stop_ids[0])
        return _llguidance().LLTokenizer(view, n_vocab=self._vocab_size, eos_token=self._stop_ids)


class _Tokens:
    """The parts of a tokenizer that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, count: int, stop_id: int) -> None:
        added = tokenizer.text.hub.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self.eos_token_id = stop_id
        # Added tokens are named, never spelled: as text `<think>` would be a word like any other.
        self.special_token_ids = sorted(id for id in added if id < count)
        self.tokens = [tokenizer.token_bytes(id) for id in range(count)]
        for id in self.special_token_ids:
            self.tokens[id] = added[id].content.encode()

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text."""
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())


def _llguidance() -> Any:
    """The library.

    Raises:
        ResourceError: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ResourceError(f"grammars need llguidance: {error}", hint=HINT) from None
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
    """Refuse what is nested too deeply, or forces too long a text."""
    level: list[object] = [schema]
    for _ in range(MOST_LEVELS):
        inner: list[object] = []
        for each in level:
            if isinstance(each, Mapping):
                inner.extend(each.values())
                _check_words([*each, each.get("const"), each.get("pattern"), *_listed(each)])
            elif isinstance(each, list | tuple):
                inner.extend(each)
        if not inner:
            return
        level = inner
    raise RequestError(f"the JSON schema has more than {MOST_LEVELS} levels")


def _listed(schema: Mapping[str, Any]) -> list[object]:
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def _check_words(words: list[object]) -> None:
    for word in words:
        if isinstance(word, str):
            _check_size(word, "a text in the JSON schema", MOST_WORD)


def _first(message: str) -> str:
    """The lines of a library's message that say what is wrong."""
    lines = [line.strip() for line in message.splitlines()]
    said = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([lines[0].rstrip(":") if lines else "no reason is known", *said])
