"""The thread that runs the engine's steps while anybody waits for an answer."""

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections import deque
from queue import Empty, SimpleQueue

from lowbit.formats.errors import LowbitError
from lowbit.formats.machine.system import explained
from lowbit.runtime.engine.delta import Delta
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.stream import Answer
from lowbit.runtime.serve.answers import Answers
from lowbit.runtime.serve.metrics import Metrics

log = logging.getLogger("lowbit.serve")
RETRY_S = 1.0  # until a step is tried again that failed without any request
STOP_S = 10.0  # for the step under way, when the server ends


class Worker:
    """Runs answers together and hands their deltas to the event loop after each step.

    An exception ends the answers that it concerns with an error, and is logged. Any type is caught:
    panics of libraries in Rust are no `Exception`, and nobody would hear of one in this thread.

    Attributes:
        open: number of answers whose last delta has not been delivered; belongs to the event loop.
        error: error of the last step; None while steps succeed.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, metrics: Metrics) -> None:
        """Prepare the thread, which `start` starts."""
        self.open = 0
        self.error: LowbitError | None = None
        self._engine, self.loop, self._metrics = engine, loop, metrics
        self._asked: SimpleQueue[Answers | None] = SimpleQueue()
        self._running: list[tuple[Answer, Answers]] = []
        self._outbox: deque[tuple[Answers, Delta]] = deque()
        self._waking = False  # the event loop has been woken, and has not run yet
        self._turned = time.monotonic()  # when the thread last began a turn, or to wait for answers
        self._over = False  # the thread takes no more answers; belongs to the event loop
        self._thread = threading.Thread(target=self._run, name="lowbit-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that it runs; answers that are not complete are lost.

        A thread that hangs is left behind after `STOP_S` seconds.
        """
        self._asked.put(None)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.error("the engine's thread hangs; it is left behind%s", self.place())

    @property
    def alive(self) -> bool:
        """True while the thread takes answers."""
        return self._thread.is_alive() and not self._over

    @property
    def stalled_s(self) -> float:
        """Seconds that the current step has run; 0 where nobody waits for an answer."""
        return time.monotonic() - self._turned if self.open else 0.0

    def begin(self, answers: Answers) -> None:
        """Hand submitted answers to the thread; called on the event loop."""
        if not self.open:
            self._turned = time.monotonic()
        self.open += len(answers.each)
        self._asked.put(answers)

    def _run(self) -> None:
        """Run steps until the end; deltas are handed over after every step."""
        try:
            while self._admit():
                if self._running:
                    running = len(self._running)
                    self._step()
                    self._collect()
                    if self.error is not None and len(self._running) == running:
                        self._fail(self.error)  # or the same step fails for ever
                    self._wake()
                    if not self._running:
                        self._step()  # gives back what has been cancelled or lost; nobody waits
        except BaseException:
            log.exception("the engine's thread has ended")
        self._wake()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._end)

    def _admit(self) -> bool:
        """Take new answers; wait for some if there is nothing to do.

        Returns:
            False when the thread is to end.
        """
        while True:
            if not self._running:
                self._wake()
            try:
                wait_s = None if self.error is None else RETRY_S
                asked = self._asked.get(block=not self._running, timeout=wait_s)
            except Empty:
                self._turned = time.monotonic()
                if self._running:
                    return True
                self._step()  # which may have come right
                continue
            self._turned = time.monotonic()
            if asked is None:
                return False
            self._running += [(answer, asked) for answer in asked.each]
            del asked  # not kept while nobody asks

    def _step(self) -> None:
        """Run a step; the engine ends the requests of a step that fails."""
        try:
            self._engine.step()
            self.error = None
        except BaseException as error:
            if self._running or self.error is None:
                log.exception("a step failed")
            self.error = explained(error) or _of_bug(error)

    def _fail(self, error: LowbitError) -> None:
        for answer, asked in self._running:
            answer.handle.cancel()
            self._queue(asked, Delta(answer.index, error=error))
        self._running.clear()

    def _collect(self) -> None:
        left = []
        for answer, asked in self._running:
            delta = self._delta_of(answer, asked.record.started)
            if delta is not None:
                self._queue(asked, delta)
            if delta is None or not delta.last:
                left.append((answer, asked))
        self._running = left

    def _delta_of(self, answer: Answer, asked_at: float) -> Delta | None:
        """The delta of an answer, if there is one; its tokens are counted."""
        try:
            before, last_at = answer.count, answer.last_at
            delta = answer.poll()
            if answer.count != before:
                self._metrics.count_tokens(answer, asked_at, before, last_at)
            if delta is not None and delta.last:
                found = answer.handle.speculation
                if found is not None:
                    self._metrics.drafts.add(found)
            return delta
        except BaseException as error:
            log.exception("an answer could not be made")
            answer.handle.cancel()
            return Delta(answer.index, error=_of_bug(error))

    def _queue(self, asked: Answers, delta: Delta) -> None:
        """Queue a delta for the event loop, which `_wake` wakes."""
        cause = None if delta.error is None else delta.error.__cause__
        if cause is not None and explained(cause) is None:  # a bug, such as in a mask
            log.error("an answer failed", exc_info=cause)
        if delta.error is not None:  # its tracebacks hold the sequence, and that the error
            delta.error.__traceback__ = delta.error.__cause__ = delta.error.__context__ = None
        self._outbox.append((asked, delta))

    def _wake(self) -> None:
        """Wake the event loop once for all deltas: it would take the interpreter in between."""
        if self._outbox and not self._waking:
            self._waking = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed
                self._outbox.clear()

    def _deliver(self) -> None:
        """Hand deltas to the tasks that wait; called on the event loop."""
        self._waking = False
        while self._outbox:
            asked, delta = self._outbox.popleft()
            self.open -= delta.last
            try:
                asked.put(delta)
            except Exception:
                log.exception("news of an answer were lost")
                asked.cancel()

    def _end(self) -> None:
        """Fail all answers that are left after the thread's end; called on the event loop."""
        self._over = True
        left, self._running = self._running, []
        while not self._asked.empty():
            asked = self._asked.get()
            left += [] if asked is None else [(answer, asked) for answer in asked.each]
        for answer, asked in left:
            answer.handle.cancel()
            gone = LowbitError("the engine has ended", hint="see the log")
            self._outbox.append((asked, Delta(answer.index, error=gone)))
        self._deliver()

    def place(self) -> str:
        """The stack of the thread, as a traceback shows it; empty if it has ended."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "\n" + "".join(traceback.format_stack(frame)).rstrip()


def _of_bug(error: BaseException) -> LowbitError:
    return LowbitError(f"the engine failed: {type(error).__name__}", hint="see the log")
