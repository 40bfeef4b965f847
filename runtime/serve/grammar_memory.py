"""Memory that the grammars of all requests may take together.

A grammar counts from before it is compiled until nobody can follow it any more. One that does not
fit waits, and so does its request.
"""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from lowbit.runtime.text.mask_time import GrammarSize

SMALL_BYTES = 1_000_000
KEPT_FOR_SMALL = 8  # the part of all memory that only small grammars may take


@dataclass(slots=True, eq=False)
class Waiter:
    """A grammar that waits for memory.

    Attributes:
        size: bytes that it takes.
        admitted: done once they are its own.
    """

    size: int
    admitted: "asyncio.Future[None]"


@dataclass(slots=True)
class GrammarMemory:
    """Memory of all grammars; all methods belong to the event loop.

    Attributes:
        total: bytes that they may take.
        loose: bytes that they gave up since the system got some.
    """

    total: int
    loose: int = 0
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
