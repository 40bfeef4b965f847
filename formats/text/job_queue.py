"""A child process (`child_process.py`) whose jobs an event loop awaits, many at a time.

They are written one behind another, so that the child begins the next one by itself, and the loop
reads several replies at once. When a thread waited for each reply, that took half the time of a
request beside 63 others. A job that ends the child fails; those behind it go to another child, and
so does, once, a job whose child was killed from outside.
A child that writes nothing for SILENT_S longer than a job may compute is ended: it was stopped from
outside, or gets no processor. Its own timer ends one that computes, whatever its job does.
"""

import asyncio
import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.text.child_process import (
    MEMORY_BYTES,
    READ_BYTES,
    SECONDS,
    SILENT_S,
    ChildProcess,
    Library,
    WorkerError,
    failure_of,
    line_of,
    value_of,
)


@dataclass(slots=True, eq=False)
class _Job:
    line: bytes
    reply: asyncio.Future[bytes] | None  # None if nobody waits for it
    retried: bool = False  # it is done once more


class JobQueue:
    """Jobs of a child, which is started with the first one; belongs to the event loop."""

    def __init__(
        self,
        seconds: float = SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        library: Library = "jinja2",
    ) -> None:
        """Keep the limits, which are those of `Worker`; no process is started yet."""
        self._seconds, self._memory_bytes, self._library = seconds, memory_bytes, library
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[_Job] = deque()  # whose replies have not come, in their order
        self._child: ChildProcess | None = None
        self._input = self._output = -1  # descriptors of the child
        self._unsent = bytearray()  # jobs, or parts of one, that are not in the pipe yet
        self._pipe_full = False  # the loop waits for room in it
        self._parts: list[bytes] = []  # of a reply whose end has not come
        self._heard = 0.0  # time of the loop at which it last had no job, or wrote something
        self._watch: asyncio.TimerHandle | None = None  # looks for its silence while there are jobs
        self._closing = threading.Lock()
        self._closed = False

    def prepare(self, job: Mapping[str, Any]) -> None:
        """Begin a job whose result is not needed, such as to compile what later ones use.

        A failure is not reported here; the next `ask` meets it again.
        """
        with contextlib.suppress(ResourceError):
            self._submit(_Job(line_of(job, self._seconds), None))

    async def ask(self, job: Mapping[str, Any]) -> Any:
        """Result of a job; errors as in `Worker.ask`."""
        line = await self._reply(line_of(job, self._seconds))
        return value_of(json.loads(line.decode()))

    async def ask_from_thread(self, job: Mapping[str, Any]) -> Any:
        """Result of a job, for other threads: blocks without an await, see `blocking`."""
        line = line_of(job, self._seconds)
        with self._closing:  # so that `close` fails what is begun before it
            self._check_open()
            asked = asyncio.run_coroutine_threadsafe(self._reply(line), self._loop)
        return value_of(json.loads(asked.result()))

    def close(self) -> None:
        """End the child; whoever waits gets an error."""
        with self._closing:
            self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._stop()
        self._fail_all(self._ended_error())

    async def _reply(self, line: bytes) -> bytes:
        self._check_open()
        reply: asyncio.Future[bytes] = self._loop.create_future()
        self._submit(_Job(line, reply))
        return await reply

    def _check_open(self) -> None:
        if self._closed:
            raise self._ended_error()

    def _ended_error(self) -> ResourceError:
        return ResourceError(f"the process that runs {self._library} has been ended")

    def _submit(self, job: _Job) -> None:
        if self._child is not None and not self._jobs and self._child.ended:
            self._stop()  # it was killed from outside between two jobs
        if self._child is None:
            self._start()
        if not self._jobs:
            self._heard = self._loop.time()
        self._jobs.append(job)
        if self._watch is None:
            self._look_later()
        self._unsent += job.line
        if not self._pipe_full:
            self._write()

    def _start(self) -> None:
        child = ChildProcess(self._library, self._memory_bytes)
        self._child = child
        self._input, self._output = child.input.fileno(), child.output.fileno()
        self._loop.add_reader(self._output, self._read)

    def _stop(self) -> None:
        """End the child if it has not ended, and forget it."""
        if self._child is None:
            return
        self._loop.remove_reader(self._output)
        if self._pipe_full:
            self._loop.remove_writer(self._input)
        self._child.end()
        self._child = None
        self._pipe_full = False
        self._unsent.clear()
        self._parts.clear()

    def _write(self) -> None:
        """Write what the pipe has room for, and the rest once it has."""
        try:
            del self._unsent[: os.write(self._input, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the child has ended, which `_read` finds
            self._unsent.clear()
        if bool(self._unsent) is self._pipe_full:
            return
        self._pipe_full = not self._pipe_full
        if self._pipe_full:
            self._loop.add_writer(self._input, self._write)
        else:
            self._loop.remove_writer(self._input)

    def _read(self) -> None:
        """Read what the child has written, and hand on whole lines."""
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._restart()
            return
        self._heard = self._loop.time()
        *whole, rest = data.split(b"\n")
        for part in whole:
            line = b"".join((*self._parts, part))
            self._parts.clear()
            self._handle_line(line)
        if rest and self._child is not None:
            self._parts.append(rest)

    def _handle_line(self, line: bytes) -> None:
        if self._child is None:
            return
        if self._child.ready:
            reply = self._jobs.popleft().reply
            if reply is not None and not reply.done():
                reply.set_result(line)
            return
        try:
            self._child.greet(line)
        except ResourceError as error:
            self._stop()
            self._fail_all(error)

    def _look_later(self) -> None:
        """Look once the child may have been silent for too long; one timer serves all jobs."""
        self._watch = self._loop.call_at(self._heard + self._seconds + SILENT_S, self._look)

    def _look(self) -> None:
        self._watch = None
        if not self._jobs:
            return
        if self._loop.time() < self._heard + self._seconds + SILENT_S:
            self._look_later()
        else:
            self._restart(WorkerError("killed", "no answer"))

    def _restart(self, error: WorkerError | None = None) -> None:
        """Start another child for all jobs; the one at hand fails, or is done once more.

        Args:
            error: reason to end the child; None for one that has ended.
        """
        child = self._child
        self._stop()
        if self._jobs and child is not None:
            first = self._jobs[0]
            failure = failure_of(child.failure(error), self._library, first.retried)
            if failure is None:
                first.retried = True
            else:
                _fail_one(self._jobs.popleft(), failure)
        left = [job for job in self._jobs if job.reply is not None and not job.reply.done()]
        self._jobs.clear()
        try:
            for job in left:
                self._submit(job)
        except LowbitError as problem:
            self._jobs = deque(left)
            self._fail_all(problem)

    def _fail_all(self, error: Exception) -> None:
        """Fail all jobs."""
        while self._jobs:
            _fail_one(self._jobs.popleft(), error)


def _fail_one(job: _Job, error: Exception) -> None:
    if job.reply is not None and not job.reply.done():
        job.reply.set_exception(error)
