"""Requests whose bodies have not come: a few may be waited for, and the idlest gives way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Crowd:
    """Connections that wait for the next part of a body; all methods belong to the event loop."""

    def __init__(self, most: int) -> None:
        """Nobody waits.

        Args:
            most: that may wait at once.
        """
        self._most = most
        self._waiting: dict[asyncio.Timeout, None] = {}  # the longest wait first

    def __len__(self) -> int:
        """Number of those that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def wait(self, seconds: float) -> AsyncIterator[None]:
        """Wait for a part of a body in the block.

        Args:
            seconds: that it may take.

        Raises:
            TimeoutError: it takes longer, or others came and this wait was the longest.
        """
        async with asyncio.timeout(seconds) as limit:
            self._waiting[limit] = None
            if len(self._waiting) > self._most:
                # Not yet: what has come already is taken without a wait.
                asyncio.get_running_loop().call_soon(self._shrink)
            try:
                yield
            finally:
                self._waiting.pop(limit, None)

    def _shrink(self) -> None:
        while len(self._waiting) > self._most:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            if not longest.expired():
                longest.reschedule(0.0)  # in the past
