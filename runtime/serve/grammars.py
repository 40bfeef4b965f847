"""Grammars of requests: tried, given memory and compiled, short ones before long ones."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import heappop, heappush
from itertools import count
from time import monotonic
from typing import TypeVar

from lowbit.formats.errors import RequestError
from lowbit.formats.machine.cores import core_count
from lowbit.formats.machine.memory import give_back
from lowbit.runtime.serve.grammar_memory import GrammarMemory
from lowbit.runtime.text.grammar import Grammar, Grammars
from lowbit.runtime.text.grammar_source import GrammarSource

SHORT = 8 << 10  # characters of a grammar that is tried and compiled beside longer ones
COSTLY = 64 << 10  # characters that a short one counts as which takes long
MANY_CORES = 4  # on fewer, one slow grammar at a time leaves a core to the engine
# The shortest that waits for a thread goes first, but a longer one that came a second earlier
# for every so many characters more. One that has been tried is compiled in its old place.
OVERTAKEN_A_S = 32 << 10
LOOSE_BYTES = 32_000_000  # given up by grammars, before the system gets them although others live
QUIET_S = 1.0  # without a grammar, until the system gets all
Result = TypeVar("Result")


class Turns:
    """Threads for work that is due at some time; all methods belong to the event loop."""

    def __init__(self, threads: int, name: str) -> None:
        """Start without a thread."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = count()

    async def run(self, work: Callable[[], Result], due: float = 0.0) -> Result:
        """Run work in a thread, what is due first before the rest; raises what the work raises."""
        loop = asyncio.get_running_loop()
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = loop.create_future()
            heappush(self._waiting, (due, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release()
                raise
        future = self._executor.submit(work)

        def release(_: Future[Result]) -> None:  # not before: a thread cannot be interrupted
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._release)

        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """End the threads after the work that they do."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _release(self) -> None:
        while self._waiting:
            turn = heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class GrammarQueue:
    """Makes the grammars of requests; all methods belong to the event loop.

    Attributes:
        memory: memory that they take.
    """

    def __init__(self, grammars: Grammars, total: int) -> None:
        """Start without a grammar.

        Args:
            grammars: makes them.
            total: bytes that all of them may take.
        """
        self.memory = GrammarMemory(total)
        self._grammars = grammars
        self._quick = Turns(1, "lowbit-grammar")
        self._slow = Turns(2 if core_count() >= MANY_CORES else 1, "lowbit-grammar")
        self._giving: asyncio.Task[None] | None = None  # memory back to the system, now or soon

    async def make(self, source: GrammarSource) -> Grammar:
        """The grammar of a source, once there is memory for it.

        Raises:
            RequestError: it cannot be used, or takes more memory than all may.
            ResourceError: see `Grammars.tried`.
        """
        try:
            return await self._made(source)
        finally:
            self._ended()

    async def _made(self, source: GrammarSource) -> Grammar:
        came, length = monotonic(), len(source.text)
        turns, due, trial = self._quick, came + length / OVERTAKEN_A_S, None
        if length <= SHORT:
            trial = await turns.run(lambda: self._grammars.tried_quickly(source), due)
        if trial is None:
            turns, due = self._slow, came + max(length, COSTLY) / OVERTAKEN_A_S
            trial = await turns.run(lambda: self._grammars.tried(source), due)
        found, most = trial, self.memory.most(trial.bytes)
        if found.bytes > most:
            raise RequestError(
                f"{source.what} takes {found.bytes / 1e6:.1f} MB, more than the "
                f"{most / 1e6:.1f} MB that this server has for grammars",
                hint="give a smaller one, or start the server with a larger --grammar-memory",
            )
        async with self.memory.promise(found.bytes):
            grammar = await turns.run(lambda: self._grammars.compile(source, found), due)
            self.memory.follow(grammar.size, self._ended)
        return grammar

    def stop(self) -> None:
        """End the threads."""
        self._quick.stop()
        self._slow.stop()

    def _ended(self) -> None:
        """Give the system what grammars gave up: much of it at once, all after the last one."""
        if self._giving is not None:
            return
        if self.memory.loose >= LOOSE_BYTES:
            self._giving = asyncio.create_task(self._give_back(0.0))
        elif self.memory.idle:
            self._giving = asyncio.create_task(self._give_back(QUIET_S))

    async def _give_back(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        if self.memory.idle or self.memory.loose >= LOOSE_BYTES:
            self.memory.loose = 0
            await self._slow.run(give_back)
        self._giving = None
