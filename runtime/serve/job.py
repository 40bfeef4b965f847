"""One answer while the engine generates it: its tokens become text, on the worker's thread."""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from lowbit.formats.errors import LowbitError
from lowbit.runtime.engine.request import CheckedRequest
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.engine.stats import Speculated
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.text.answer import CLOSE, AnswerSplitter, Begin, Event, Piece
from lowbit.runtime.text.tokenizer import Tokenizer
from lowbit.runtime.text.tools import CallForm, Tool

if TYPE_CHECKING:
    from lowbit.runtime.serve.answers import Mailbox

StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer to ask for.

    Attributes:
        tokens: request to the engine.
        begin: beginning of the output, see `Begin`.
        stops: strings that end the answer and are left out of it.
        tools: tools that may be called; without any, nothing is taken for a call.
        form: form of calls.
        parallel: an answer may have several calls.
        calls_in_pieces: calls are sent before they are complete.
    """

    tokens: CheckedRequest
    begin: Begin
    stops: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    form: CallForm | None = None
    parallel: bool = True
    calls_in_pieces: bool = False


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token with its log-probabilities, where the request asks for them.

    Attributes:
        id: id of the token.
        found: log-probabilities in its place.
        reasoning: the token belongs to the reasoning.
    """

    id: int
    found: TokenLogProbabilities
    reasoning: bool


@dataclass(frozen=True, slots=True)
class End:
    """The end of an answer.

    Attributes:
        reason: `stop` for a stop token or string, `length` for a full context or the limit.
        stop: stop string that ended it, if one did.
        cached_tokens: prompt tokens that the cache held.
        new_tokens: tokens of the output.
        reasoning_tokens: new tokens that are reasoning.
        calls: complete calls of tools.
        speculation: drafted and accepted tokens; None where speculation is off.
        first_tokens: new tokens of the first step.
        first_at: time of the first step's end.
        last_at: time of the last token.
    """

    reason: StopReason
    stop: str | None = None
    cached_tokens: int = 0
    new_tokens: int = 0
    reasoning_tokens: int = 0
    calls: int = 0
    speculation: Speculated | None = None
    first_tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0

    @property
    def chat_reason(self) -> str:
        """`finish_reason` of a chat."""
        return "tool_calls" if self.calls and self.reason == "stop" else self.reason

    @property
    def message_reason(self) -> str:
        """`stop_reason` of Anthropic's messages."""
        if self.reason == "length":
            return "max_tokens"
        if self.stop is not None:
            return "stop_sequence"
        return "tool_use" if self.calls else "end_turn"


@dataclass(frozen=True, slots=True)
class Update:
    """New text and tokens of one answer.

    Attributes:
        index: number of the answer in its request.
        events: new text and calls.
        tokens: new tokens with log-probabilities, where the request asks for them.
        cached_tokens: prompt tokens that the cache held.
        prompt: log-probabilities of the prompt's tokens, in the first update, where the request
            asks for them.
        end: set in the last update, unless an error ended the answer.
        error: error that ended the answer.
    """

    index: int
    events: list[Event]
    tokens: list[AnswerToken]
    cached_tokens: int = 0
    prompt: tuple[TokenLogProbabilities | None, ...] = ()
    end: End | None = None
    error: LowbitError | None = None

    @property
    def last(self) -> bool:
        """True if no update of this answer follows."""
        return self.end is not None or self.error is not None


@dataclass(slots=True, eq=False)
class Job:
    """An answer that the engine generates; all but `cancel` belongs to the worker's thread.

    Attributes:
        index: number of the answer in its request.
        ask: answer to ask for.
        mailbox: queue of the updates.
        tokenizer: tokenizer of the model.
        asked_at: time of the request.
        cancelled: nobody waits for the answer any more.
        handle: the engine's handle, once the request has been submitted.
        count: tokens so far.
        last_at: time of the last token.
    """

    index: int
    ask: Ask
    mailbox: "Mailbox"
    tokenizer: Tokenizer
    asked_at: float
    cancelled: bool = False
    handle: Handle | None = None
    count: int = 0
    last_at: float = 0.0
    _splitter: AnswerSplitter = field(init=False)
    _close: int | None = field(init=False)
    _reasoning: bool = field(init=False)
    _reasoning_tokens: int = 0
    _updated: bool = False  # there has been news
    _first_tokens: int = 0  # of the first step
    _first_at: float = 0.0

    def __post_init__(self) -> None:
        """Prepare to read the first token."""
        ask = self.ask
        self._splitter = AnswerSplitter(
            self.tokenizer,
            ask.begin,
            ask.stops,
            ask.tools,
            ask.form,
            ask.parallel,
            ask.calls_in_pieces,
        )
        self._close = self.tokenizer.token_id(CLOSE)
        self._reasoning = self.ask.begin == "reasoning"

    def cancel(self) -> None:
        """End the answer before the next step, from any thread."""
        self.cancelled = True
        if self.handle is not None:
            self.handle.cancel()

    def collect(self) -> Update | None:
        """The update since the last call; None if nothing is new."""
        handle = self.handle
        if handle is None:
            return None
        events: list[Event] = []
        tokens: list[AnswerToken] = []
        prompt = () if self._updated else handle.prompt_log_probabilities
        first = self.count == 0
        update = partial(Update, self.index, events, tokens, handle.reused, prompt)
        try:
            for id in handle.poll():
                end = self._push(id, events, tokens, first)
                if end is not None:
                    handle.cancel()
                    return update(end)
        except LowbitError as error:
            return update(error=error)
        if handle.ended:
            return update(self._finish("length", events))
        if not events and not tokens:
            return None
        self._updated = True
        return update()

    def _push(
        self, id: int, events: list[Event], tokens: list[AnswerToken], first: bool
    ) -> End | None:
        """Read a token; returns the end if it is the last.

        Args:
            id: token id.
            events: list that its text and calls are appended to.
            tokens: list that its log-probabilities are appended to.
            first: the token is of the first step.
        """
        self.count += 1
        self.last_at = time.perf_counter()
        if first:
            self._first_tokens, self._first_at = self.count, self.last_at
        if id in self.ask.tokens.request.stop_ids:
            return self._finish("stop", events)
        if self.ask.tokens.request.sampling.logprobs is not None and self.handle is not None:
            found = self.handle.log_probabilities[self.count - 1]
            tokens.append(AnswerToken(id, found, self._reasoning))
        new = self._splitter.push(id)
        events += new
        self._note_reasoning(id, new)
        return self._finish("stop", events) if self._splitter.stopped else None

    def _note_reasoning(self, id: int, new: list[Event]) -> None:
        """Count a token of the reasoning, and note where that ends."""
        if self._reasoning:
            self._reasoning_tokens += 1
            self._reasoning = id != self._close
        elif new and isinstance(new[0], Piece) and new[0].reasoning:
            self._reasoning, self._reasoning_tokens = True, self.count

    def _finish(self, reason: StopReason, events: list[Event]) -> End:
        events += self._splitter.finish()
        return End(
            reason=reason,
            stop=self._splitter.stop if reason == "stop" else None,
            cached_tokens=0 if self.handle is None else self.handle.reused,
            new_tokens=self.count,
            reasoning_tokens=self._reasoning_tokens,
            calls=self._splitter.calls,
            speculation=None if self.handle is None else self.handle.speculation,
            first_tokens=self._first_tokens,
            first_at=self._first_at,
            last_at=self.last_at,
        )
