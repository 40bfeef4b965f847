"""The text of one request while it is being made, and what is known when it has ended."""

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

from lowbit.formats.errors import RequestError
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.state.sampling import SamplingParams
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
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    reasoning: str
    text: str
    finish_reason: FinishReason
    seed: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate from.

    Attributes:
        prompt: token ids.
        sampling: how tokens are chosen.
        max_new_tokens: None for as many as the context holds.
        stop_ids: tokens that end the text.
        stops: strings that end the text and are left out of it.
        begin: whether the output begins with reasoning.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int | None
    stop_ids: frozenset[int]
    stops: tuple[str, ...]
    begin: Begin

    @property
    def turns(self) -> int | None:
        """Tokens up to the last end of a turn, which the next prompt will begin with too.

        After it comes what asks for the answer, and that may be rendered otherwise once the answer
        is there. None where no turn has ended.
        """
        for index in range(len(self.prompt) - 1, -1, -1):
            if self.prompt[index] in self.stop_ids:
                return index + 1
        return None


class Stream(Iterator[str]):
    """The answer to one request as it is made: iterate it, then read `generation`.

    Attributes:
        pieces: the same with the reasoning before it; iterate one of the two.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, request: Request) -> None:
        """Set up the request; nothing runs before the first `next`."""
        self.pieces = self._run(engine, tokenizer, request)
        self._generation: Generation | None = None

    def __next__(self) -> str:
        """The next piece of the answer, never empty."""
        while (piece := next(self.pieces)).reasoning:
            pass
        return piece.text

    def close(self) -> None:
        """Stop early; the model is then free for the next request."""
        self.pieces.close()

    @property
    def generation(self) -> Generation:
        """The result, once the stream is exhausted.

        Raises:
            RequestError: the stream has not ended.
        """
        if self._generation is None:
            raise RequestError("the stream has not ended", hint="iterate it to its end first")
        return self._generation

    def _run(
        self, engine: Engine, tokenizer: Tokenizer, request: Request
    ) -> Generator[Piece, None, None]:
        prompt = request.prompt
        text = Splitter(tokenizer, request.begin, request.stops)
        count = request.max_new_tokens or engine.room(len(prompt))
        ids: list[int] = []
        pieces: list[Piece] = []
        reason: FinishReason = "length"
        started = first = last = time.perf_counter()
        for id in engine.generate(prompt, request.sampling, count, request.turns):
            last = time.perf_counter()
            first = last if not ids else first
            ids.append(id)
            piece = None if id in request.stop_ids else text.push(id)
            if piece is not None:
                pieces.append(piece)
                yield piece
            if id in request.stop_ids or text.stopped:
                reason = "stop"
                break
        tail = text.finish()
        if tail is not None:
            pieces.append(tail)
            yield tail
        self._generation = Generation(
            prompt_token_ids=prompt,
            token_ids=tuple(ids),
            reasoning="".join(piece.text for piece in pieces if piece.reasoning),
            text="".join(piece.text for piece in pieces if not piece.reasoning),
            finish_reason=reason,
            seed=engine.seed,
            timings=Timings(
                prompt_tokens=len(prompt),
                reused_tokens=engine.reused,
                first_token_s=first - started,
                decode_s=last - first,
                decode_tokens_per_s=(len(ids) - 1) / (last - first) if len(ids) > 1 else None,
            ),
        )
