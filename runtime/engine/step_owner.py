"""The owner of an engine's steps: one thread, whoever waits for tokens lets it run them.

That is the first thread to wait, so that a lone one hands nothing over; once another waits beside
it, and for asyncio tasks, it is the engine's own thread, until no request runs any more.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from threading import Lock, get_ident
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
DRIVER = -1  # in place of a thread's identifier: the engine's own thread owns the steps


class StepOwner:
    """Lets the owner of the steps do work for any thread."""

    def __init__(self, running: Callable[[], bool]) -> None:
        """Begin with the engine's own thread, which is not started yet.

        Args:
            running: true while requests run that nobody has cancelled.
        """
        self._running = running
        self._owner = DRIVER
        self._choosing = Lock()

    @cached_property
    def _driver(self) -> ThreadPoolExecutor:
        """The engine's own thread."""
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="lowbit-engine")

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Let the owner do something: this thread if nothing runs, else the engine's own."""
        caller = get_ident()
        if self._owner != caller:
            with self._choosing:
                self._owner = DRIVER if self._running() else caller
        if self._owner == caller:
            return work(*args, **kwargs)
        return self._driver.submit(work, *args, **kwargs).result()

    def run_later(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        """Let the engine's own thread do something, without blocking the event loop."""
        self._owner = DRIVER
        return asyncio.wrap_future(self._driver.submit(work, *args, **kwargs))
