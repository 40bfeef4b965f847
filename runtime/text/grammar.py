"""Grammars that an answer must follow, by llguidance (the `serve` extra).

A grammar knows, behind any beginning of an answer, every token of the vocabulary that may come
next. What compiles a grammar, or makes a mask, cannot be interrupted: a grammar is tried in a child
process first, its size is limited, and so is the time that the masks of an answer take. Importing
this module needs no llguidance.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.errors import RequestError
from lowbit.formats.text.child_process import WorkerError
from lowbit.formats.text.worker import Worker
from lowbit.runtime.text.grammar_source import (
    OWN_LIMITS,
    GrammarSource,
    choice_source,
    lark_source,
    llguidance,
    reason_of,
    regex_source,
    schema_source,
)
from lowbit.runtime.text.mask_time import GrammarSize, MaskTime, Watch
from lowbit.runtime.text.tokenizer import Tokenizer

FEW_SYMBOLS = 500  # a mask of so few cannot take long
# In the child, less than the 2 MB that a thread has at least: what fits there fits here. Masks take
# less than 128 KB.
STACK_BYTES = 3 << 19
CPU_S = 1.0  # of the processor, to compile; large schemas take 0.3
QUICK_S = 0.02  # the same for one that shall hold up no other; most schemas of one page take half
VOCABULARY_S = 10.0  # of the processor, to prepare the vocabulary
BYTES_A_LETTER = 100  # of a compiled grammar, where the system does not tell
MOST_TRIED = 1024  # results of trials that are kept, of 200 bytes


class GrammarConstraint:
    """Follows one answer; a stop id may come where the grammar is complete."""

    def __init__(self, matcher: Any, words: int, time: MaskTime) -> None:
        """Start before the first token."""
        self._matcher, self._time = matcher, time
        self._words = torch.zeros(words, dtype=torch.int32)

    @property
    def done(self) -> bool:
        """Never: it limits the last token too."""
        return False

    @property
    def free_tokens(self) -> int:
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
        self._matcher.unsafe_compute_mask_ptr(self._words.data_ptr(), self._words.nbytes)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = reason_of(self._matcher.get_error())
            raise RequestError(f"the grammar cannot be followed any further: {reason}")


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A grammar that is ready for any number of answers.

    They share the states of its lexer, whose number is limited. A server keeps no grammar for other
    requests: one could fail for what another has written.
    """

    _matcher: Any
    _words: int
    _watch: Watch | None  # for masks that may take long
    size: GrammarSize = field(default_factory=GrammarSize)

    def constraint(self) -> GrammarConstraint:
        """The constraint of one answer."""
        time = MaskTime(self._watch, self.size)
        return GrammarConstraint(self._matcher.deep_copy(), self._words, time)


@dataclass(frozen=True, slots=True)
class Trial:
    """Measured facts of a usable grammar."""

    bytes: int  # memory that it takes once it is compiled
    large: bool  # one of its masks may take long


class Grammars:
    """Makes grammars over the tokens of one model; from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Collection[int]) -> None:
        """Tokens are prepared, within a second, when the first grammar is asked for."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._stop_ids = sorted(id for id in stop_ids if id < vocab_size)
        self._lock = Lock()
        self._watch = Watch()
        self._trials: OrderedDict[bytes, Trial] = OrderedDict()

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON that a schema allows; see `schema_source`, and `compile` for errors."""
        return self.made(schema_source(schema))

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Grammar:
        """Text of a regular expression; see `regex_source`, and `compile` for errors."""
        return self.made(regex_source(pattern))

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of several texts; see `choice_source`, and `compile` for errors."""
        return self.made(choice_source(texts))

    def lark(self, text: str, limits: Mapping[str, Any] = OWN_LIMITS) -> Grammar:
        """Text of a context-free grammar; see `lark_source`, and `compile` for errors."""
        return self.made(lark_source(text, limits))

    def made(self, source: GrammarSource) -> Grammar:
        """The grammar of a source, tried before; errors as in `tried` and `compile`."""
        trial = self.tried(source)
        return self.compile(source, trial)

    def tried(self, source: GrammarSource) -> Trial:
        """Compile a source in a child process, where it can do no harm.

        Raises:
            RequestError: it cannot be used, or needs too much time, memory or stack.
            ResourceError: llguidance is not installed, or the process cannot be started.
        """
        try:
            return self._tried(source, quick=False)
        except WorkerError as failure:
            match failure.kind:
                case "time":
                    reason = f"takes more than {CPU_S:g} s to prepare"
                case "memory":
                    reason = "takes too much memory to prepare"
                case _:
                    reason = f"is too deep or too large to be prepared ({failure})"
            raise RequestError(f"{source.what} {reason}") from None

    def tried_quickly(self, source: GrammarSource) -> Trial | None:
        """Try a grammar within QUICK_S, beside trials that take longer.

        Returns:
            None where it fails for want of time, memory or stack: `tried` says for which.
        """
        try:
            return self._tried(source, quick=True)
        except WorkerError:
            return None

    def _tried(self, source: GrammarSource, quick: bool) -> Trial:
        """Result of a trial, from before or from a child; raises WorkerError, too."""
        key = hashlib.sha256(repr((source.text, source.limits)).encode()).digest()
        with self._lock:
            child = self._children[quick]
            known = self._trials.get(key)
        if known is not None:
            return known
        found = child.ask(
            {
                "do": "grammar",
                "grammar": source.text,
                "limits": dict(source.limits),
                "few": FEW_SYMBOLS,
                "cpu_seconds": QUICK_S if quick else CPU_S,
                "stack_bytes": STACK_BYTES,
            }
        )
        if found["error"]:
            raise RequestError(f"{source.what} cannot be used: {reason_of(found['error'])}")
        size = found["bytes"]
        trial = Trial(len(source.text) * BYTES_A_LETTER if size is None else size, found["large"])
        with self._lock:
            self._trials[key] = trial
            while len(self._trials) > MOST_TRIED:
                self._trials.popitem(last=False)
        return trial

    def compile(self, source: GrammarSource, trial: Trial) -> Grammar:
        """The grammar of a source that has been tried.

        Raises:
            RequestError: it cannot be used with the tokens of the model.
        """
        library = llguidance()
        with self._lock:
            tokens = self._tokens
        limits = library.LLParserLimits(**source.limits)
        matcher = library.LLMatcher(tokens, source.text, log_level=0, limits=limits)
        watch = self._watch if trial.large else None
        made = Grammar(matcher, -(-self._vocab_size // 32), watch, GrammarSize(trial.bytes))
        if not matcher.is_error():
            matcher = made.constraint().begun()  # finds what only shows when it is used
        if matcher.is_error():
            raise RequestError(f"{source.what} cannot be used: {reason_of(matcher.get_error())}")
        return made

    @cached_property
    def _tokens(self) -> Any:
        """The library's view of the tokenizer."""
        view = _Tokens(self._tokenizer, self._vocab_size, self._stop_ids[0])
        return llguidance().LLTokenizer(view, n_vocab=self._vocab_size, eos_token=self._stop_ids)

    @cached_property
    def _children(self) -> tuple[Worker, Worker]:
        """The processes that try grammars: any, and quick ones."""
        if not self._stop_ids:
            raise RequestError("the model has no stop token, so no grammar can end its answers")
        vocabulary = {
            "do": "vocabulary",
            "count": self._vocab_size,
            "special": _special(self._tokenizer, self._vocab_size),
            "stops": self._stop_ids,
        }
        slow, quick = (
            Worker(VOCABULARY_S, library="llguidance", prelude=vocabulary) for _ in range(2)
        )
        return slow, quick


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
    added = tokenizer.text.hub.get_added_tokens_decoder()
    return {id: token.content for id, token in added.items() if id < count}
