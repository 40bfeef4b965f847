"""Grammars of requests: tried, given memory and compiled, short ones before long ones.

A grammar counts from before it is compiled until nobody can follow it any more. One that does not
fit waits, and so does its request.
"""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from time import monotonic
from typing import TypeVar

from lowbit.formats.errors import RequestError
from lowbit.formats.machine.cores import core_count
from lowbit.formats.machine.memory import give_back
from lowbit.runtime.text.grammar import Grammar, Grammars
from lowbit.runtime.text.grammar_source import GrammarSource
from lowbit.runtime.text.mask_time import GrammarSize

SHORT = 8 << 10  # characters of a grammar that is tried and compiled beside longer ones
COSTLY = 64 << 10  # characters that a short one counts as which takes long
MANY_CORES = 4  # on fewer, one slow grammar at a time leaves a core to the engine
# The shortest that waits for a thread goes first, but a longer one that came a second earlier
# for every so many characters more. One that has been tried is compiled in its old place.
OVERTAKEN_A_S = 32 << 10
LOOSE_BYTES = 32_000_000  # given up by grammars, before the system gets them although others live
QUIET_S = 1.0  # without a grammar, until the system gets all
SMALL_BYTES = 1_000_000
KEPT_FOR_SMALL = 8  # the part of all memory that only small grammars may take
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Waiter:
    """A grammar that waits for memory."""

    size: int
    admitted: "asyncio.Future[None]"  # done once they are its own


@dataclass(slots=True)
class GrammarMemory:
    """Memory of all grammars; all methods belong to the event loop."""

    total: int = 0
    loose: int = 0  # bytes that they gave up since the system got some
    _promised: int = 0  # to grammars that are being compiled
    _live: dict[int, "weakref.ref[GrammarSize]"] = field(default_factory=dict)
    _waiting: deque[Waiter] = field(default_factory=deque)
    _numbers: "count[int]" = field(default_factory=count)

    @property
    def used(self) -> int:
        """Bytes that grammars take."""
        return self._promised + sum(size.bytes for size in self._sizes())

    @property
    def waiting(self) -> int:
        """Number of grammars that wait for memory."""
        return sum(not waiter.admitted.done() for waiter in self._waiting)

    @property
    def idle(self) -> bool:
        """True without any grammar."""
        return not (self._promised or self._live or self._waiting)

    def most(self, size: int) -> int:
        """Most bytes of all grammars with one of this size that is begun."""
        return self.total if size <= SMALL_BYTES else self.total - self.total // KEPT_FOR_SMALL

    @asynccontextmanager
    async def promise(self, size: int) -> AsyncIterator[None]:
        """Keep so many bytes inside the block, for a grammar that is compiled there.

        Waits until they are free. Large grammars wait in order; small ones pass them.
        """
        await self._admitted(size)
        try:
            yield
        finally:
            self._promised -= size
            self.admit()

    def follow(self, size: GrammarSize, ended: Callable[[], None]) -> None:
        """Count a grammar until nobody holds its size; `ended` is called then, from any thread."""
        number = next(self._numbers)
        self._live[number] = weakref.ref(size)
        loop = asyncio.get_running_loop()
        compiled = size.compiled

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, number, compiled, ended)

        weakref.finalize(size, tell).atexit = False

    def admit(self) -> None:
        """Let grammars in for which there is memory now."""
        blocked = False
        for waiter in tuple(self._waiting):
            if waiter.admitted.done():
                self._waiting.remove(waiter)
            elif not (blocked and waiter.size > SMALL_BYTES) and self._fits(waiter.size):
                self._promised += waiter.size
                waiter.admitted.set_result(None)
                self._waiting.remove(waiter)
            else:
                blocked |= waiter.size > SMALL_BYTES

    async def _admitted(self, size: int) -> None:
        waiter = Waiter(size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self.admit()
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.cancelled() or not waiter.admitted.done():
                waiter.admitted.cancel()
            else:
                self._promised -= size
            self.admit()
            raise

    def _fits(self, size: int) -> bool:
        used = self.used
        if size <= SMALL_BYTES:  # what masks have added keeps no small one out
            used = self._promised + sum(each.compiled for each in self._sizes())
        return used + size <= self.most(size)

    def _sizes(self) -> list[GrammarSize]:
        found = [reference() for reference in tuple(self._live.values())]
        return [size for size in found if size is not None]

    def _end(self, number: int, compiled: int, ended: Callable[[], None]) -> None:
        del self._live[number]
        self.loose += compiled
        self.admit()
        ended()


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
    """Makes the grammars of requests; all methods belong to the event loop."""

    def __init__(self, grammars: Grammars) -> None:
        """Start without a grammar, and without memory for one."""
        self.memory = GrammarMemory()
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
