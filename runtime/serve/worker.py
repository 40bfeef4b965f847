"""The one thread that runs the engine's steps while anybody waits for an answer."""

import asyncio
import logging
import threading
from collections import deque
from queue import Empty, SimpleQueue

from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.machine.system import explained
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.serve.job import Job, Update
from lowbit.runtime.serve.metrics import Metrics

log = logging.getLogger("lowbit.serve")


class Worker:
    """Runs jobs together and tells the event loop what each step brought.

    Attributes:
        loop: of the server.
        open: jobs whose last update has not been delivered; belongs to the event loop.
        error: why the last step failed; None while steps succeed.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, metrics: Metrics) -> None:
        """Nothing is asked for yet; `start` starts the thread."""
        self.open = 0
        self.error: LowbitError | None = None
        self._engine, self.loop, self._metrics = engine, loop, metrics
        self._asked: SimpleQueue[Job | None] = SimpleQueue()
        self._running: list[Job] = []
        self._outbox: deque[tuple[Job, Update]] = deque()
        self._waking = False  # the event loop has been told, and has not looked yet
        self._thread = threading.Thread(target=self._run, name="lowbit-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread behind the step that it runs; answers that are not complete are lost."""
        self._asked.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """True while answers can be made."""
        return self._thread.is_alive()

    def begin(self, job: Job) -> None:
        """Take up a job, on the event loop."""
        self.open += 1
        self._asked.put(job)

    def _run(self) -> None:
        while self._admit():
            if self._running:
                self._step()
                self._collect()
                self._wake()
                if not self._running and self.error is None:
                    self._step()  # gives back what a stop string has cancelled; nobody waits
        self._wake()

    def _admit(self) -> bool:
        """Hand new jobs to the engine, waiting for one if there is nothing to do.

        Returns:
            False when the thread is to end.
        """
        while True:
            if not self._running:
                self._wake()
            try:
                job = self._asked.get(block=not self._running)
            except Empty:
                return True
            if job is None:
                return False
            self._submit(job)

    def _submit(self, job: Job) -> None:
        if job.cancelled:
            self._post(job, Update(job.index, [], [], error=_left()))
            return
        try:
            job.handle = self._engine.submit(job.ask.tokens)
        except LowbitError as error:
            self._post(job, Update(job.index, [], [], error=error))
            return
        if job.cancelled:  # meanwhile
            job.handle.cancel()
        self._running.append(job)

    def _step(self) -> None:
        """Run a step; one that fails ends all jobs."""
        try:
            self._engine.step()
            self.error = None
        except (LowbitError, RuntimeError, MemoryError, OSError, ValueError, TypeError) as error:
            log.exception("a step failed")
            self.error = explained(error) or ResourceError("the engine failed", hint="see the log")
            for job in self._running:
                job.cancel()
                self._post(job, Update(job.index, [], [], error=self.error))
            self._running.clear()

    def _collect(self) -> None:
        """Post what the step brought."""
        done = False
        for job in self._running:
            before, last_at = job.count, job.last_at
            update = job.collect()
            if job.count != before:
                self._metrics.count_tokens(job, before, last_at)
            if update is None:
                if job.cancelled:
                    update = Update(job.index, [], [], error=_left())
                else:
                    continue
            self._post(job, update)
            done |= update.last
        if done:
            self._running = [job for job in self._running if job.handle is not None]

    def _post(self, job: Job, update: Update) -> None:
        """Keep an update for the event loop until `_wake`."""
        if update.last:
            found = None if job.handle is None else job.handle.speculation
            if found is not None:
                self._metrics.count_drafts(found)
            job.handle = None
        self._outbox.append((job, update))

    def _wake(self) -> None:
        """Tell the event loop of all updates at once: it would take the interpreter in between."""
        if self._outbox and not self._waking:
            self._waking = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed
                self._outbox.clear()

    def _deliver(self) -> None:
        """Hand out updates, on the event loop."""
        self._waking = False
        while self._outbox:
            job, update = self._outbox.popleft()
            self.open -= update.last
            job.mailbox.put(update)


def _left() -> LowbitError:
    return LowbitError("nobody waits for the answer")
