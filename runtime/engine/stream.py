"""The text of one request while it is being made, and what is known when it has ended."""

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from lowbit.formats.errors import RequestError
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.handle import Handle
from lowbit.runtime.engine.request import CheckedRequest
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.speculation.tally import Speculated
from lowbit.runtime.text.reasoning import Begin, Piece, Splitter
from lowbit.runtime.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a request went, in seconds.

    Attributes:
        prompt_tokens: length of the prompt.
        reused_tokens: of them, those the cache held from earlier turns.
        first_token_s: from the start of the request to the first token.
        decode_s: from the first to the last token.
        decode_tokens_per_s: over the tokens after the first; None where there is none.
    """

    prompt_tokens: int
    reused_tokens: int
    first_token_s: float
    decode_s: float
    decode_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request produced.

    Attributes:
        token_ids: every new token, the stop token included.
        reasoning: what a reasoning model thought before it answered; empty where it did not.
        text: the answer without special tokens, cut before a stop string.
        finish_reason: `stop` for a stop id or string, `length` for a full context or
            `max_new_tokens`.
        seed: that makes a sampled text again.
        log_probabilities: of every new token; empty unless `SamplingParams.logprobs` asks for them.
        speculation: drafts that were verified and accepted; None where speculation is off.
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


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request whose tokens become text.

    Attributes:
        tokens: for the engine.
        stops: strings that end the text and are left out of it.
        begin: the way the output begins, see `Begin`.
    """

    tokens: CheckedRequest
    stops: tuple[str, ...]
    begin: Begin


@dataclass(slots=True)
class Answer:
    """The text of one request as its tokens arrive.

    Attributes:
        handle: gives the tokens.
        generation: the result, once it is complete.
    """

    request: Request
    tokenizer: Tokenizer
    handle: Handle
    generation: Generation | None = None
    _text: Splitter = field(init=False)
    _ids: list[int] = field(default_factory=list)
    _pieces: list[Piece] = field(default_factory=list)
    _marks: list[float] = field(init=False)  # times of the request, its first and its last token

    def __post_init__(self) -> None:
        """The request begins now."""
        self._text = Splitter(self.tokenizer, self.request.begin, self.request.stops)
        self._marks = [time.perf_counter()] * 3

    def push(self, id: int) -> Piece | None:
        """Take a token; returns the text that is certain with it."""
        now = time.perf_counter()
        self._marks = [self._marks[0], self._marks[1] if self._ids else now, now]
        self._ids.append(id)
        if id in self.request.tokens.request.stop_ids:
            return self._finish("stop")
        piece = self._text.push(id)
        if piece is not None:
            self._pieces.append(piece)
        if self._text.stopped:
            self.handle.cancel()
            self._finish("stop")
        return piece

    def end(self) -> Piece | None:
        """Note that no token comes any more; returns text that has been held back."""
        return self._finish("length") if self.generation is None else None

    def _finish(self, reason: FinishReason) -> Piece | None:
        tail = self._text.finish()
        if tail is not None:
            self._pieces.append(tail)
        started, first, last = self._marks
        count = len(self._ids) - 1
        self.generation = Generation(
            prompt_token_ids=self.request.tokens.request.prompt,
            token_ids=tuple(self._ids),
            reasoning="".join(piece.text for piece in self._pieces if piece.reasoning),
            text="".join(piece.text for piece in self._pieces if not piece.reasoning),
            finish_reason=reason,
            seed=self.handle.seed,
            timings=Timings(
                prompt_tokens=len(self.request.tokens.request.prompt),
                reused_tokens=self.handle.reused,
                first_token_s=first - started,
                decode_s=last - first,
                decode_tokens_per_s=count / (last - first) if count > 0 else None,
            ),
            log_probabilities=self.handle.log_probabilities[: len(self._ids)],
            speculation=self.handle.speculation,
        )
        return tail


class Stream(Iterator[str]):
    """The answer to one request as it is made: iterate it, then read `generation`.

    Attributes:
        pieces: the same with the reasoning before it; iterate one of the two.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, request: Request) -> None:
        """Set up the request; nothing runs before the first `next`."""
        self._made: list[Generation] = []  # empty until the end
        self.pieces = _pieces(engine, tokenizer, request, self._made)

    def __next__(self) -> str:
        """The next piece of the answer, never empty."""
        while (piece := next(self.pieces)).reasoning:
            pass
        return piece.text

    def close(self) -> None:
        """Stop early; what the request holds is free then."""
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
    engine: Engine, tokenizer: Tokenizer, request: Request, made: list[Generation]
) -> Generator[Piece, None, None]:
    """Pieces of an answer, whose result is put into `made` behind the last one.

    No method of the stream: a reference back to it would keep one that nobody holds any more from
    being cancelled at once.
    """
    answer = Answer(request, tokenizer, engine.submit(request.tokens))
    try:
        for id in answer.handle:
            piece = answer.push(id)
            if piece is not None:
                yield piece
            if answer.generation is not None:
                break
    except BaseException:  # whoever keeps it keeps the handle, whose request would run on
        answer.handle.cancel()
        raise
    tail = answer.end()
    if tail is not None:
        yield tail
    if answer.generation is not None:
        made.append(answer.generation)
