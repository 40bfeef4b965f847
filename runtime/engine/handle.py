"""The user's end of a request: its tokens one by one, from any thread or task."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from lowbit.runtime.engine.sequence import Finish, Sequence, TokenLogProbabilities
from lowbit.runtime.speculation.tally import Speculated, Tally

if TYPE_CHECKING:
    from lowbit.runtime.engine.engine import Engine


class Handle(Iterator[int], AsyncIterator[int]):
    """Token ids of one request as they are chosen; iterate it, or `async for` over it.

    A handle that nobody holds any more cancels its request.
    """

    def __init__(self, engine: "Engine", sequence: Sequence) -> None:
        """Belongs to a sequence that the engine knows."""
        self._engine, self._sequence = engine, sequence

    def __next__(self) -> int:
        """The next token; waits for it.

        Raises:
            StopIteration: the request has ended.
            LowbitError: the request has failed.
        """
        token = self._engine.next_token(self._sequence)
        if token is None:
            raise StopIteration
        return token

    async def __anext__(self) -> int:
        """The next token, without blocking the event loop; see `__next__`.

        The driver runs a step at a time, so that a request that waits for room does not hold up
        those that run; a task that is cancelled meanwhile takes no token with it.
        """
        engine, sequence = self._engine, self._sequence
        loop = asyncio.get_running_loop()
        while (token := sequence.take()) is None:
            if not await loop.run_in_executor(engine.driver, engine.advance, sequence):
                raise StopAsyncIteration
        return token

    def __aiter__(self) -> "Handle":
        """The handle itself."""
        return self

    def poll(self) -> list[int]:
        """Tokens that are there, without waiting for others.

        Several threads may ask: each token goes to one of them.

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
        """All tokens of the request, those that have been taken included; waits for the end.

        Raises:
            LowbitError: the request has failed.
        """
        for _ in self:
            pass
        return tuple(self._sequence.output)

    def cancel(self) -> None:
        """End the request before the next step; what it holds is free then."""
        self._sequence.cancelled = True

    def __del__(self) -> None:
        """Cancel what nobody waits for."""
        self.cancel()

    @property
    def finish_reason(self) -> Finish | None:
        """`stop` for a stop id, `length` for the last token that fits or was asked for.

        `cancelled` where the request was; None before its end, and where an error ended it.
        """
        return self._sequence.finish

    @property
    def begun(self) -> bool:
        """True once the first token has been read."""
        return bool(self._sequence.output) or self._sequence.phase == "ended"

    @property
    def log_probabilities(self) -> tuple[TokenLogProbabilities, ...]:
        """Those of the tokens so far; empty where the request does not want them."""
        return tuple(self._sequence.log_probabilities)

    @property
    def prompt_log_probabilities(self) -> tuple[TokenLogProbabilities | None, ...]:
        """Those of the prompt's tokens, None for the first, where the request wants them.

        Empty before the first new token, or the end of a request for none.
        """
        return self._sequence.prompt_log_probabilities

    @property
    def seed(self) -> int:
        """Seed of the request's random numbers."""
        return self._sequence.seed

    @property
    def tally(self) -> Tally:
        """Drafts of the request that have been checked."""
        return self._sequence.tally

    @property
    def speculation(self) -> Speculated | None:
        """Drafts of the request so far; None where the engine does not speculate."""
        return None if self._engine.drafting is None else self._sequence.tally.speculated

    @property
    def reused(self) -> int:
        """Tokens of the prompt that were in the cache; 0 before the first token."""
        return self._sequence.reused
