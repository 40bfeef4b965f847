"""Grammars that an answer must follow, by llguidance (the `serve` extra).

A grammar knows, behind any beginning of an answer, every token of the vocabulary that may come
next. What compiles a grammar, or makes a mask, cannot be interrupted: a grammar is tried in a child
process first, its size is limited, and so is the time that the masks of an answer take. Importing
this module needs no llguidance.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.machine.system import install_hint
from lowbit.formats.text.worker import Worker, WorkerError
from lowbit.runtime.text.mask_time import MaskTime, Watch
from lowbit.runtime.text.tokenizer import Tokenizer

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
    "max_lexer_states": 50_000,  # of 1 to 2 kB
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
FEW_SYMBOLS = 500  # a mask of so few cannot take long
# In the child, less than the 2 MB that a thread has at least: what fits there fits here. Masks take
# less than 128 KB.
STACK_BYTES = 3 << 19
CPU_S = 1.0  # to compile; large schemas take 0.03
WALL_S = 10.0  # the same on a busy machine


class GrammarConstraint:
    """Follows one answer; a stop id may come where the grammar is complete."""

    def __init__(self, matcher: Any, words: int, time: MaskTime) -> None:
        """Start before the first token.

        Args:
            matcher: an `LLMatcher`, of this answer alone.
            words: words of a mask.
            time: time limit of this answer's masks.
        """
        self._matcher, self._time = matcher, time
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
        self._time.mask(self._fill)
        self._check()
        return self._words

    def accept(self, token: int) -> None:
        """Go on behind a token; see `Constraint`."""
        self._time.measure(lambda: self._matcher.consume_token(token))
        self._check()

    def copy(self) -> "GrammarConstraint":
        """Another one in the same state; takes microseconds."""
        self._time.check()
        return GrammarConstraint(self._matcher.deep_copy(), len(self._words), self._time)

    def forced(self, most: int) -> Sequence[int]:
        """Tokens whose text the grammar allows alone, cut as the tokenizer cuts it."""
        if self._time.watch is not None:
            self._time.mask(self._fill)  # finds them where it can be waited for
        tokens: list[int] = []
        self._time.measure(lambda: tokens.extend(self._matcher.compute_ff_tokens()))
        self._check()
        return tokens[:most]

    def begun(self) -> Any:
        """The matcher behind its first mask."""
        self._time.mask(self._fill)
        return self._matcher

    def _fill(self) -> None:
        """Make the mask."""
        self._matcher.unsafe_compute_mask_ptr(self._words.data_ptr(), self._words.nbytes)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _first(self._matcher.get_error())
            raise RequestError(f"the grammar cannot be followed any further: {reason}")


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A grammar that is ready for any number of answers."""

    _matcher: Any
    _words: int
    _watch: Watch | None  # for masks that may take long

    def constraint(self) -> GrammarConstraint:
        """The constraint of one answer."""
        return GrammarConstraint(self._matcher.deep_copy(), self._words, MaskTime(self._watch))


class Grammars:
    """Makes grammars over the tokens of one model; from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Collection[int]) -> None:
        """Tokens are prepared, within a second, when the first grammar is asked for.

        Args:
            tokenizer: tokenizer of the model.
            vocab_size: V, tokens that can be chosen.
            stop_ids: tokens that end an answer.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._stop_ids = sorted(id for id in stop_ids if id < vocab_size)
        self._lock = Lock()
        self._watch = Watch()

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON that a schema allows, its properties in the order of the schema.

        Raises:
            RequestError: no schema, one with keywords that are not implemented, or too large, too
                deep or too costly.
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
        library = _llguidance().LLMatcher
        try:
            grammar = library.grammar_from_json_schema(
                text, None, JSON_NOTATION | {"lenient": False}
            )
        except ValueError as error:
            raise RequestError(f"{what} cannot be used: {_first(str(error))}") from None
        return self._made(grammar, what, SCHEMA_LIMITS)

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Grammar:
        """Text that a regular expression matches from its first character to its last.

        Raises:
            RequestError: no such expression, or too large or too costly a one.
            ResourceError: llguidance is not installed.
        """
        what = "the regular expression"
        _check_size(pattern, what, MOST_WORD)
        return self._made(_llguidance().LLMatcher.grammar_from_regex(pattern), what, OWN_LIMITS)

    def choice(self, texts: Sequence[str]) -> Grammar:
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
        return self._made(_llguidance().LLMatcher.grammar_from_lark(grammar), what, OWN_LIMITS)

    def lark(self, text: str, limits: Mapping[str, Any] = OWN_LIMITS) -> Grammar:
        """Text of a context-free grammar in llguidance's variant of Lark.

        There `<name>` is the added token of that name, such as `<think>`.

        Args:
            text: text of the grammar.
            limits: limits of the library; `SCHEMA_LIMITS` where lowbit wrote the rules itself.

        Raises:
            RequestError: no such grammar, or one that is too large, too deep or too costly.
            ResourceError: llguidance is not installed.
        """
        what = "the grammar"
        _check_size(text, what)
        for word in WORDS.findall(text):
            _check_size(word, f"a text in {what}", MOST_WORD)
        if limits is OWN_LIMITS:
            text += NO_FORCING
        return self._made(_llguidance().LLMatcher.grammar_from_lark(text), what, limits)

    def _made(self, grammar: str, what: str, limits: Mapping[str, Any]) -> Grammar:
        library = _llguidance()
        with self._lock:
            tokens, child = self._tokens, self._child
        large = _is_large(child, grammar, what, limits)
        matcher = library.LLMatcher(
            tokens, grammar, log_level=0, limits=library.LLParserLimits(**limits)
        )
        made = Grammar(matcher, -(-self._vocab_size // 32), self._watch if large else None)
        if not matcher.is_error():
            matcher = made.constraint().begun()  # finds what only shows when it is used
        if matcher.is_error():
            raise RequestError(f"{what} cannot be used: {_first(matcher.get_error())}")
        return made

    @cached_property
    def _tokens(self) -> Any:
        """The library's view of the tokenizer."""
        if not self._stop_ids:
            raise RequestError("the model has no stop token, so no grammar can end its answers")
        view = _Tokens(self._tokenizer, self._vocab_size, self._stop_ids[0])
        return _llguidance().LLTokenizer(view, n_vocab=self._vocab_size, eos_token=self._stop_ids)

    @cached_property
    def _child(self) -> Worker:
        """The process that tries grammars."""
        vocabulary = {
            "do": "vocabulary",
            "count": self._vocab_size,
            "special": _special(self._tokenizer, self._vocab_size),
            "stops": self._stop_ids,
        }
        return Worker(WALL_S, library="llguidance", prelude=vocabulary)


class _Tokens:
    """The parts of a tokenizer that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, count: int, stop_id: int) -> None:
        added = _special(tokenizer, count)
        self._tokenizer = tokenizer
        self.eos_token_id = stop_id
        # Added tokens are named, never spelled: as text `<think>` would be a word like any other.
        self.special_token_ids = sorted(added)
        self.tokens = [tokenizer.token_bytes(id) for id in range(count)]
        for id, name in added.items():
            self.tokens[id] = name.encode()

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text."""
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())


def _special(tokenizer: Tokenizer, count: int) -> dict[int, str]:
    """Names of the added tokens with an id below `count`."""
    added = tokenizer.text.hub.get_added_tokens_decoder()
    return {id: token.content for id, token in added.items() if id < count}


def _is_large(child: Worker, grammar: str, what: str, limits: Mapping[str, Any]) -> bool:
    """Compile a grammar in a child process; true if its masks have to be watched.

    Raises:
        RequestError: it cannot be used, or needs too much time, memory or stack.
        ResourceError: the process cannot be started.
    """
    job = {"do": "grammar", "grammar": grammar, "limits": dict(limits), "few": FEW_SYMBOLS}
    try:
        found = child.ask(job | {"cpu_seconds": CPU_S, "stack_bytes": STACK_BYTES})
    except WorkerError as failure:
        match failure.kind:
            case "time":
                reason = f"takes more than {CPU_S:g} s to prepare"
            case "memory":
                reason = "takes too much memory to prepare"
            case _:
                reason = f"is too deep or too large to be prepared ({failure})"
        raise RequestError(f"{what} {reason}") from None
    if found["error"]:
        raise RequestError(f"{what} cannot be used: {_first(found['error'])}")
    return bool(found["large"])


def _llguidance() -> Any:
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


def _first(message: str) -> str:
    """The lines of a library's message that say what is wrong, without names of its own code."""
    lines = [
        line.strip() for line in message.replace("Expected f64", "Expected number").splitlines()
    ]
    if lines[:1] == [NOTHING_FITS]:
        return "no text fits: a rule only leads back to itself, or a class of characters is empty"
    said = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([lines[0].rstrip(":") if lines else "no reason is known", *said])
