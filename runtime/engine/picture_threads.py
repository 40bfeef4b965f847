"""Threads that work on pictures beside the engine's steps, in the order in which they are asked.

Work is held by those who wait for it, and by nobody else: once they are gone it is not begun, or
ends at its next piece, and its memory with it. The threads of an executor would keep both.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar
from weakref import ReferenceType, ref

from lowbit.runtime.images.file import GoesOn

T = TypeVar("T")
Run = Callable[[GoesOn], T]  # does a work; between two pieces it may raise CancelledError


class PictureWork(Future[T]):
    """Result of a thread's work; it is done for as long as somebody holds this."""

    def __init__(self, run: Run[T], size_bytes: int) -> None:
        """Wait for a thread; the result will take so much memory."""
        super().__init__()
        self.run: Run[T] | None = run  # until a thread has taken it up
        self.size_bytes = size_bytes


@dataclass(slots=True, eq=False)
class PictureThreads:
    """At most `most` threads, which end where nothing is left to do.

    The program waits for them at its end, until the next piece of their work: threads that it does
    not wait for may end it with an abort while they are in a library.
    """

    most: int
    name: str
    _queue: deque[ReferenceType[PictureWork[Any]]] = field(default_factory=deque, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _threads: int = 0  # that run
    _stopped: bool = False

    def begin(self, run: Run[T], size_bytes: int) -> PictureWork[T]:
        """Let a thread do a work when its turn comes.

        Args:
            run: does it.
            size_bytes: memory of its result.

        Raises:
            RuntimeError: no thread can be started.
        """
        work = PictureWork(run, size_bytes)
        with self._lock:
            if self._threads < self.most:
                thread = threading.Thread(target=self._work, name=f"{self.name}-{self._threads}")
                try:
                    thread.start()
                except RuntimeError:
                    if not self._threads:
                        raise
                else:
                    self._threads += 1
            self._queue.append(ref(work))
        return work

    def stop(self) -> None:
        """End all work at its next piece."""
        self._stopped = True

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            asked, run = taken
            _do(run, asked, partial(self._goes_on, asked))
            del taken, run  # what it holds is not kept until the next one comes

    def _next(self) -> tuple[ReferenceType[PictureWork[Any]], Run[Any]] | None:
        """The next work that somebody holds; None where there is none, which ends the thread."""
        with self._lock:
            while self._queue:
                found = self._queue.popleft()
                work = found()
                if work is not None and work.run is not None:
                    run, work.run = work.run, None
                    return found, run
            self._threads -= 1
        return None

    def _goes_on(self, work: ReferenceType[PictureWork[Any]]) -> bool:
        return work() is not None and not self._stopped and threading.main_thread().is_alive()


def _do(run: Run[T], asked: ReferenceType[PictureWork[T]], goes_on: GoesOn) -> None:
    """Do a work, and tell whoever still waits for it."""
    try:
        if not goes_on():
            raise CancelledError
        found = run(goes_on)
    # Of any kind, a panic of a library in Rust included: those who wait get it.
    except BaseException as error:
        _tell(asked, methodcaller("set_exception", error))
    else:
        _tell(asked, methodcaller("set_result", found))


def _tell(asked: ReferenceType[PictureWork[T]], settle: Callable[[PictureWork[T]], None]) -> None:
    """Settle a work, which no frame of an error's traceback holds afterwards."""
    if (work := asked()) is not None:
        with suppress(InvalidStateError):  # somebody has cancelled it
            settle(work)
