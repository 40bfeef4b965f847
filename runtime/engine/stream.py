"""Answers to requests: their tokens as they are chosen, and their text."""

import time
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.runtime.engine.delta import AnswerToken, Delta, End, FinishReason
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.sequence import Finish, TokenLogProbabilities
from lowbit.runtime.engine.sequence import Sequence as TokenSequence
from lowbit.runtime.engine.stats import Speculated, Tally
from lowbit.runtime.text.answer import CLOSE, THINKING_STARTS, AnswerSplitter, Event, Piece
from lowbit.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lowbit.runtime.engine.engine import Engine


class Handle(Iterator[int], AsyncIterator[int]):
    """Token ids of one request as they are chosen, for `for` and `async for`.

    Deleting the handle cancels the request.
    """

    def __init__(self, engine: "Engine", sequence: TokenSequence) -> None:
        """Read the tokens of a sequence that the engine has queued."""
        self._engine, self._sequence = engine, sequence

    def __next__(self) -> int:
        """Next token; runs steps until it is there.

        Raises:
            StopIteration: the request has ended.
            LowbitError: the request has failed.
        """
        token = self._engine.next_token(self._sequence)
        if token is None:
            raise StopIteration
        return token

    async def __anext__(self) -> int:
        """Next token, without blocking the event loop; see `__next__`.

        The engine's thread runs one step at a time, so a request that waits for room does not hold
        up those that run; a task that is cancelled meanwhile loses no token.
        """
        sequence = self._sequence
        while (token := sequence.take()) is None:
            if not await self._engine.advance_later(sequence):
                raise StopAsyncIteration
        return token

    def __aiter__(self) -> "Handle":
        """The handle itself."""
        return self

    def poll(self) -> list[int]:
        """Tokens that are ready now, without waiting.

        Each token goes to one of the threads that ask.

        Raises:
            LowbitError: the request has failed, and its tokens have been taken.
        """
        error = self._sequence.error  # before its tokens: those that came with it are there then
        tokens = list(iter(self._sequence.take, None))
        if error is not None and not tokens:
            raise error
        return tokens

    @property
    def ended(self) -> bool:
        """True once all tokens have been taken; never for a request that failed, see `poll`."""
        sequence = self._sequence
        return sequence.phase == "ended" and not sequence.unread and sequence.error is None

    def result(self) -> tuple[int, ...]:
        """All tokens of the request, taken ones included; waits for its end.

        Raises:
            LowbitError: the request has failed.
        """
        for _ in self:
            pass
        return self.output

    def cancel(self) -> None:
        """End the request, and free its memory, before the next step."""
        self._sequence.cancel()

    def __del__(self) -> None:
        """Cancel a request that nobody waits for."""
        self.cancel()

    @property
    def finish_reason(self) -> Finish | None:
        """`stop` for a stop id, `length` for the last token, or `cancelled`.

        None before the end, and if an error ended the request.
        """
        return self._sequence.finish

    @property
    def begun(self) -> bool:
        """True once the first token has been read."""
        return bool(self._sequence.output) or self._sequence.phase == "ended"

    @property
    def output(self) -> tuple[int, ...]:
        """Tokens so far, those that have been taken included."""
        return tuple(self._sequence.output)

    @property
    def log_probabilities(self) -> Sequence[TokenLogProbabilities]:
        """Log-probabilities of the tokens so far; empty unless the request asks for them."""
        return self._sequence.log_probabilities

    @property
    def prompt_log_probabilities(self) -> tuple[TokenLogProbabilities | None, ...]:
        """Log-probabilities of the prompt's tokens, None for the first.

        Empty unless the request asks for them, and before its first new token or its end.
        """
        return self._sequence.prompt_log_probabilities

    @property
    def seed(self) -> int:
        """Seed of the request's random numbers."""
        return self._sequence.seed

    @property
    def tally(self) -> Tally:
        """Counts of checked drafts."""
        return self._sequence.tally

    @property
    def speculation(self) -> Speculated | None:
        """Results of speculation so far; None without speculation."""
        return None if self._engine.drafting is None else self._sequence.tally.speculated

    @property
    def queued_s(self) -> float | None:
        """Seconds that the request waited for its row; None before, and if it never got one."""
        return self._sequence.queued_s

    @property
    def reused(self) -> int:
        """Tokens of the prompt that came from the prefix cache; 0 before the first token."""
        return self._sequence.reused


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of a request, in seconds.

    Attributes:
        prompt_tokens: length of the prompt.
        reused_tokens: tokens of the prompt that came from the prefix cache.
        first_token_s: from the start of the request to the first token.
        decode_s: from the first to the last token.
        decode_tokens_per_s: over the tokens after the first; None if there are none.
    """

    prompt_tokens: int
    reused_tokens: int
    first_token_s: float
    decode_s: float
    decode_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Generation:
    """Result of a request.

    Attributes:
        token_ids: all new tokens, the stop token included.
        reasoning: reasoning before the answer; empty without.
        text: the answer without special tokens, cut before a stop string.
        finish_reason: `stop` for a stop id or string, `length` for a full context or
            `max_new_tokens`.
        seed: reproduces a sampled text.
        log_probabilities: of every new token; empty unless `SamplingParams.logprobs` is given.
        speculation: counts of checked drafts; None without speculation.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    reasoning: str
    text: str
    finish_reason: FinishReason
    seed: int
    timings: Timings
    log_probabilities: tuple[TokenLogProbabilities, ...] = ()
    speculation: Speculated | None = None


class TokenSource(Protocol):
    """Source of an answer's tokens: a `Handle`, or what stands for one in another process."""

    def poll(self) -> list[int]:
        """Tokens that are ready now; raises the LowbitError of a request that has failed."""

    def cancel(self) -> None:
        """End the request."""

    @property
    def ended(self) -> bool:
        """True once all tokens have been taken; never for a request that failed."""

    @property
    def log_probabilities(self) -> Sequence[TokenLogProbabilities]:
        """Those of the tokens so far; empty unless the request asks for them."""

    @property
    def prompt_log_probabilities(self) -> tuple[TokenLogProbabilities | None, ...]:
        """Those of the prompt's tokens; empty unless the request asks for them."""

    @property
    def reused(self) -> int:
        """Tokens of the prompt that came from the prefix cache."""

    @property
    def speculation(self) -> Speculated | None:
        """Results of speculation so far; None without speculation."""


@dataclass(slots=True)
class Answer:
    """The answer to one request while its tokens become text, which the caller keeps."""

    request: Request  # request that is answered
    tokenizer: Tokenizer  # tokenizer of the model
    handle: TokenSource
    index: int = 0  # number of the answer among those of its request
    count: int = 0  # tokens so far
    in_reasoning: bool = field(init=False)  # the next token belongs to the reasoning
    reasoning_tokens: int = 0  # tokens of the reasoning so far
    # `stop` for a stop token or string, `length` for a full context or the limit; None before the
    # end
    finish_reason: FinishReason | None = None
    started_at: float = field(init=False)  # time of the request
    first_at: float = field(init=False)  # time of the first token
    last_at: float = field(init=False)  # time of the last token
    _told: bool = False  # there has been a delta
    _first_tokens: int = 0  # of the first step
    _first_step_at: float = 0.0
    _close: int | None = field(init=False)  # id of the tag that ends the reasoning
    _splitter: AnswerSplitter = field(init=False)

    def __post_init__(self) -> None:
        """Prepare to read the first token; the request begins now."""
        request = self.request
        self.started_at = self.first_at = self.last_at = time.perf_counter()
        self.in_reasoning = request.begin in THINKING_STARTS
        self._close = self.tokenizer.token_id(CLOSE)
        self._splitter = AnswerSplitter(
            self.tokenizer,
            request.begin,
            request.stops,
            request.tools,
            request.form,
            request.parallel,
            request.calls_in_pieces,
            cut_calls=True,
        )

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._splitter.stop if self.finish_reason == "stop" else None

    def push(self, id: int) -> list[Event]:
        """Read a token; returns the text and the calls that are certain with it."""
        self.last_at = time.perf_counter()
        if not self.count:
            self.first_at = self.last_at
        self.count += 1
        if id in self.request.stop_ids:
            return self._finish("stop")
        events = self._splitter.push(id)
        self._note_reasoning(id, events)
        if self._splitter.stopped:
            self.handle.cancel()
            events += self._finish("stop")
        return events

    def poll(self) -> Delta | None:
        """Text and tokens since the last call, without waiting; None if there are none."""
        handle, first = self.handle, self.count == 0
        prompt = () if self._told else handle.prompt_log_probabilities
        delta = Delta(self.index, cached_tokens=handle.reused, prompt=prompt)
        try:
            for id in handle.poll():
                self._read(id, delta)
                if self.finish_reason is not None:
                    break
        except LowbitError as error:
            return replace(delta, error=error)
        if first:
            self._first_tokens, self._first_step_at = self.count, self.last_at
        if handle.ended:
            delta.events.extend(self.end())
        if self.finish_reason is not None:
            return replace(delta, end=self.summary(self.finish_reason))
        if not delta.events and not delta.tokens:
            return None
        self._told = True
        return delta

    def _read(self, id: int, delta: Delta) -> None:
        """Read a token; what is certain with it is appended to the delta."""
        in_reasoning = self.in_reasoning
        delta.events.extend(self.push(id))
        request = self.request
        if request.sampling.logprobs is not None and id not in request.stop_ids:
            found = self.handle.log_probabilities[self.count - 1]
            delta.tokens.append(AnswerToken(id, found, in_reasoning))

    def summary(self, reason: FinishReason) -> End:
        """Facts of an end, of the tokens so far."""
        return End(
            reason=reason,
            stop=self.stop,
            cached_tokens=self.handle.reused,
            new_tokens=self.count,
            reasoning_tokens=self.reasoning_tokens,
            calls=self._splitter.calls,
            speculation=self.handle.speculation,
            first_tokens=self._first_tokens,
            first_at=self._first_step_at,
            last_at=self.last_at,
        )

    def end(self) -> list[Event]:
        """Note that no token comes any more; returns what has been held back."""
        return self._finish("length") if self.finish_reason is None else []

    def _note_reasoning(self, id: int, events: list[Event]) -> None:
        """Count a token of the reasoning, and note where that ends."""
        if self.in_reasoning:
            self.reasoning_tokens += 1
            self.in_reasoning = id != self._close
        elif events and isinstance(events[0], Piece) and events[0].reasoning:
            self.in_reasoning, self.reasoning_tokens = True, self.count

    def _finish(self, reason: FinishReason) -> list[Event]:
        self.finish_reason = reason
        return self._splitter.finish()


def generation_of(answer: Answer, handle: Handle, events: Iterable[Event]) -> Generation:
    """The result of an answer that has ended without calls, from its tokens and its text."""
    pieces, decode_s = _pieces_of(events), answer.last_at - answer.first_at
    prompt = answer.request.prompt
    return Generation(
        prompt_token_ids=prompt,
        token_ids=handle.output[: answer.count],
        reasoning="".join(piece.text for piece in pieces if piece.reasoning),
        text="".join(piece.text for piece in pieces if not piece.reasoning),
        finish_reason=answer.finish_reason or "length",
        seed=handle.seed,
        timings=Timings(
            prompt_tokens=len(prompt),
            reused_tokens=handle.reused,
            first_token_s=answer.first_at - answer.started_at,
            decode_s=decode_s,
            decode_tokens_per_s=(answer.count - 1) / decode_s if answer.count > 1 else None,
        ),
        log_probabilities=tuple(handle.log_probabilities[: answer.count]),
        speculation=handle.speculation,
    )


class Stream(Iterator[str]):
    """The answer to one request as it is made: iterate it, then read `generation`.

    Attributes:
        pieces: the same with the reasoning before it; iterate one of the two.
    """

    def __init__(self, engine: "Engine", tokenizer: Tokenizer, request: Request) -> None:
        """Prepare the request, which is submitted at the first `next`."""
        self._made: list[Generation] = []  # empty until the end
        self.pieces = _pieces(engine, tokenizer, request, self._made)

    def __next__(self) -> str:
        """The next piece of the answer, never empty."""
        while (piece := next(self.pieces)).reasoning:
            pass
        return piece.text

    def close(self) -> None:
        """Cancel the request."""
        self.pieces.close()

    @property
    def generation(self) -> Generation:
        """The result, once the stream is exhausted.

        Raises:
            RequestError: the stream has not ended.
        """
        if not self._made:
            raise RequestError("the stream has not ended", hint="iterate it to its end first")
        return self._made[0]


def _pieces(
    engine: "Engine", tokenizer: Tokenizer, request: Request, made: list[Generation]
) -> Generator[Piece, None, None]:
    """Pieces of an answer, whose result is put into `made` behind the last one.

    No method of the stream: a reference back to it would keep one that nobody holds any more from
    being cancelled at once.
    """
    handle = engine.submit(request)
    answer = Answer(request, tokenizer, handle)
    events: list[Event] = []
    try:
        for id in handle:
            new = answer.push(id)
            events += new
            yield from _pieces_of(new)
            if answer.finish_reason is not None:
                break
    except BaseException:  # whoever keeps it keeps the handle, whose request would run on
        handle.cancel()
        raise
    rest = answer.end()
    yield from _pieces_of(rest)
    made.append(generation_of(answer, handle, events + rest))


def _pieces_of(events: Iterable[Event]) -> list[Piece]:
    return [event for event in events if isinstance(event, Piece)]


def answer_all(
    engine: "Engine", tokenizer: Tokenizer, requests: Iterable[Request | LowbitError]
) -> Iterator[tuple[int, Generation | LowbitError]]:
    """Run requests together, as many as there is room for.

    Args:
        requests: requests in the order in which they begin; an error stands for a request that
            could not be made. They are asked for when there is room.

    Yields:
        The number of a request and its result or the error that ended it, in the order in which
        they end.
    """
    waiting = enumerate(requests)
    running: dict[int, tuple[Answer, Handle, list[Event]]] = {}
    more = True
    beside = engine.runner.rows  # as many wait as run, so that a free row is taken at once
    if engine.scheduler.most_waiting is not None:
        beside = min(beside, engine.scheduler.most_waiting)
    while running or more:
        while more and len(running) < engine.runner.rows + beside:
            number, request = next(waiting, (-1, None))
            more = request is not None
            if isinstance(request, Request):
                try:
                    handle = engine.submit(request)
                    running[number] = Answer(request, tokenizer, handle), handle, []
                except LowbitError as error:
                    yield number, error
            elif request is not None:
                yield number, request
        if running:
            engine.step()
        for number, (answer, handle, events) in list(running.items()):
            delta = answer.poll()
            if delta is None:
                continue
            events += delta.events
            if delta.last:
                del running[number]
                yield number, delta.error or generation_of(answer, handle, events)
