"""Hands the engine's updates to the task that waits for them."""

import asyncio
from collections.abc import Sequence

from lowbit.runtime.serve.job import Update


class Mailbox:
    """Updates of the answers to one request, in the order in which they were made.

    All methods belong to the event loop.
    """

    __slots__ = ("_updates", "_waiter")

    def __init__(self) -> None:
        """Nothing has come yet."""
        self._updates: list[Update] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, update: Update) -> None:
        """Add an update and wake whoever waits."""
        self._updates.append(update)
        self.wake()

    def wake(self) -> None:
        """Let whoever waits look for other news."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> Sequence[Update]:
        """All updates since the last call, at least one; none behind `wake`."""
        if not self._updates:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        found, self._updates = self._updates, []
        return found
