"""The thread that runs the engine's steps while anybody waits for an answer."""

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from lowbit.formats.errors import LowbitError
from lowbit.formats.machine.system import explained
from lowbit.runtime.engine.delta import Delta
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.request import TokenRequest
from lowbit.runtime.engine.stream import Answer
from lowbit.runtime.serve.metrics import Metrics
from lowbit.runtime.text.tokenizer import Tokenizer

log = logging.getLogger("lowbit.serve")
RETRY_S = 1.0  # until a step is tried again that failed without any request
STOP_S = 10.0  # for the step under way, when the server ends


class Mailbox:
    """Queue of deltas from the engine's thread to the task that answers the request.

    All methods belong to the event loop.
    """

    __slots__ = ("_deltas", "_waiter")

    def __init__(self) -> None:
        """Start empty."""
        self._deltas: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        """Append a delta and wake the waiting task."""
        self._deltas.append(delta)
        self.wake()

    def wake(self) -> None:
        """Make `take` return although no delta has come."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> Sequence[Delta]:
        """Wait for deltas; returns all since the last call, none only after `wake`."""
        if not self._deltas:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        found, self._deltas = self._deltas, []
        return found


@dataclass(slots=True, eq=False)
class Job:
    """An answer that the engine generates; all but `cancel` belongs to the worker's thread.

    Attributes:
        index: number of the answer in its request.
        request: request to the engine.
        mailbox: queue of what the answer gains.
        tokenizer: tokenizer of the model.
        asked_at: time of the request.
        cancelled: nobody waits for the answer any more.
        answer: the answer so far, once the request has been submitted and until its last delta.
    """

    index: int
    request: TokenRequest
    mailbox: Mailbox
    tokenizer: Tokenizer
    asked_at: float
    cancelled: bool = False
    answer: Answer | None = None

    def cancel(self) -> None:
        """End the answer before the next step, from any thread."""
        self.cancelled = True
        if self.answer is not None:
            self.answer.handle.cancel()


class Worker:
    """Runs jobs together and hands their deltas to the event loop after each step.

    An exception ends the jobs that it concerns with an error, and is logged. Any type is caught:
    panics of libraries in Rust are no `Exception`, and nobody would hear of one in this thread.

    Attributes:
        loop: event loop of the server.
        open: number of jobs whose last delta has not been delivered; belongs to the event loop.
        error: error of the last step; None while steps succeed.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, metrics: Metrics) -> None:
        """Prepare the thread, which `start` starts."""
        self.open = 0
        self.error: LowbitError | None = None
        self._engine, self.loop, self._metrics = engine, loop, metrics
        self._asked: SimpleQueue[Job | None] = SimpleQueue()
        self._running: list[Job] = []
        self._outbox: deque[tuple[Job, Delta]] = deque()
        self._waking = False  # the event loop has been woken, and has not run yet
        self._turned = time.monotonic()  # when the thread last began a turn, or to wait for a job
        self._over = False  # the thread takes no more jobs; belongs to the event loop
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
        """True while the thread takes jobs."""
        return self._thread.is_alive() and not self._over

    @property
    def stalled_s(self) -> float:
        """Seconds that the current step has run; 0 where nobody waits for an answer."""
        return time.monotonic() - self._turned if self.open else 0.0

    def begin(self, job: Job) -> None:
        """Hand a job to the thread; called on the event loop."""
        if self._over:
            job.mailbox.put(Delta(job.index, error=_gone()))
            return
        if not self.open:
            self._turned = time.monotonic()
        self.open += 1
        self._asked.put(job)

    def _run(self) -> None:
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
        """Submit new jobs to the engine; wait for one if there is nothing to do.

        Returns:
            False when the thread is to end.
        """
        while True:
            if not self._running:
                self._wake()
            try:
                wait_s = None if self.error is None else RETRY_S
                job = self._asked.get(block=not self._running, timeout=wait_s)
            except Empty:
                self._turned = time.monotonic()
                if self._running:
                    return True
                self._step()  # which may have come right
                continue
            self._turned = time.monotonic()
            if job is None:
                return False
            self._submit(job)
            del job  # not kept while nobody asks

    def _submit(self, job: Job) -> None:
        if job.cancelled:
            self._queue(job, Delta(job.index, error=_left()))
            return
        try:
            handle = self._engine.submit(job.request)
            job.answer = Answer(job.request, job.tokenizer, handle, job.index)
        except LowbitError as error:
            self._queue(job, Delta(job.index, error=error))
            return
        except BaseException as error:
            log.exception("a request could not be begun")
            self._queue(job, Delta(job.index, error=_of_bug(error)))
            return
        if job.cancelled:  # meanwhile
            handle.cancel()
        self._running.append(job)

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
        """End all jobs with an error."""
        for job in self._running:
            job.cancel()
            self._queue(job, Delta(job.index, error=error))
        self._running.clear()

    def _collect(self) -> None:
        """Queue the deltas of the step for the event loop."""
        done = False
        for job in self._running:
            delta = self._delta_of(job)
            if delta is not None:
                self._queue(job, delta)
                done |= delta.last
        if done:
            self._running = [job for job in self._running if job.answer is not None]

    def _delta_of(self, job: Job) -> Delta | None:
        """The delta of a job, if there is one; its tokens are counted."""
        answer = job.answer
        if answer is None:
            return None
        try:
            before, last_at = answer.count, answer.last_at
            delta = answer.poll()
            if answer.count != before:
                self._metrics.count_tokens(answer, job.asked_at, before, last_at)
            if delta is None and job.cancelled:
                delta = Delta(job.index, error=_left())
            if delta is not None and delta.last:
                found = answer.handle.speculation
                if found is not None:
                    self._metrics.count_drafts(found)
            return delta
        except BaseException as error:
            log.exception("an answer could not be made")
            job.cancel()
            return Delta(job.index, error=_of_bug(error))

    def _queue(self, job: Job, delta: Delta) -> None:
        """Queue a delta for the event loop, which `_wake` wakes."""
        cause = None if delta.error is None else delta.error.__cause__
        if cause is not None and explained(cause) is None:  # a bug, such as in a mask
            log.error("an answer failed", exc_info=cause)
        if delta.error is not None:  # its tracebacks hold the sequence, and that the error
            delta.error.__traceback__ = delta.error.__cause__ = delta.error.__context__ = None
        if delta.last:
            job.answer = None
        self._outbox.append((job, delta))

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
            job, delta = self._outbox.popleft()
            self.open -= delta.last
            try:
                job.mailbox.put(delta)
            except Exception:
                log.exception("news of an answer were lost")
                job.cancel()

    def _end(self) -> None:
        """Fail all jobs that are left after the thread's end; called on the event loop."""
        self._over = True
        left = self._running
        while not self._asked.empty():
            job = self._asked.get()
            left += () if job is None else (job,)
        for job in left:
            job.cancel()
            self._outbox.append((job, Delta(job.index, error=_gone())))
        self._running = []
        self._deliver()

    def place(self) -> str:
        """The stack of the thread, as a traceback shows it; empty if it has ended."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "\n" + "".join(traceback.format_stack(frame)).rstrip()


def _left() -> LowbitError:
    return LowbitError("nobody waits for the answer")


def _gone() -> LowbitError:
    return LowbitError("the engine has ended", hint="see the log")


def _of_bug(error: BaseException) -> LowbitError:
    return LowbitError(f"the engine failed: {type(error).__name__}", hint="see the log")
