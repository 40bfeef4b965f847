"""A child process for work whose time and memory a file controls.

A chat template, a regular expression or a grammar can loop for ever, fill the memory or overflow
the stack, and none can be stopped inside this process. The child (`child.py`) has limits of time
and memory and none of the environment's secrets; it is started once, and answers a job in a
fraction of a millisecond. A failure to start it is a ResourceError, not an error of the file. One
that is silent, as it was stopped from outside, is ended, and its job done once more.
"""

import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from lowbit.formats.errors import ResourceError
from lowbit.formats.text.child_process import (
    MEMORY_BYTES,
    SECONDS,
    SILENT_S,
    ChildProcess,
    Library,
    WorkerError,
    failure_of,
    line_of,
    value_of,
)

Ask = Callable[[Mapping[str, Any]], Awaitable[Any]]  # gives a job to a child
P = ParamSpec("P")
Result = TypeVar("Result")


class Worker:
    """A child process, started with the first job and again after a job that ended it.

    Attributes:
        seconds: of the processor that a job may take by default.
        memory_bytes: address space of the child.
        library: key of the library that does the jobs; the child imports it when it starts.
    """

    def __init__(
        self,
        seconds: float = SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        library: Library = "jinja2",
        prelude: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the limits; no process is started yet.

        Args:
            prelude: first job of every started process; it may have its own `seconds`.
        """
        self.seconds = seconds
        self.memory_bytes = memory_bytes
        self.library = library
        self._prelude = prelude
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        self._unread = 0  # replies that nobody waits for
        self._longest_s = max(seconds, (prelude or {}).get("seconds", 0.0))  # of other jobs
        self._silence_s = 0.0  # after which the child is ended

    def submit(self, job: Mapping[str, Any]) -> None:
        """Begin a job without waiting for its reply, as a preparation for later jobs.

        A failure is not reported here; the next `ask` meets it again.

        Raises:
            TypeError: the job is not plain JSON; also ValueError, RecursionError.
        """
        line = line_of(job, self.seconds)
        with self._lock, contextlib.suppress(WorkerError, ResourceError), self._whole():
            self._silence_s = self._longest_s + SILENT_S
            self._send(line)
            self._unread += 1

    def ask(self, job: Mapping[str, Any], seconds: float | None = None) -> Any:
        """Run a job and return its result.

        Args:
            job: plain JSON, as `child.Handler` understands it.
            seconds: of the processor that this job may take; None for the worker's own.

        Raises:
            WorkerError: the job fails, or breaks a limit.
            ResourceError: the process cannot be started, or was killed or stopped twice.
            TypeError: the job is not plain JSON; also ValueError, RecursionError.
        """
        seconds = self.seconds if seconds is None else seconds
        line = line_of(job, seconds)
        retried = False
        while True:
            try:
                return value_of(self._reply(line, seconds))
            except WorkerError as error:
                failure = failure_of(error, self.library, retried)
                if failure is not None:
                    raise failure from None
            retried = True

    def _reply(self, line: bytes, seconds: float) -> dict[str, Any]:
        with self._lock, self._whole():
            self._silence_s = max(seconds, self._longest_s) + SILENT_S
            child = self._send(line)
            while self._unread:
                self._receive(child)
                self._unread -= 1
            return self._receive(child)

    async def ask_blocking(self, job: Mapping[str, Any]) -> Any:
        """Run a job as `ask` does; see `blocking`."""
        return self.ask(job)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """End the process if an exception or an interrupt leaves half a line in its pipes."""
        try:
            yield
        except BaseException:
            self._stop()
            raise

    def _send(self, line: bytes) -> ChildProcess:
        """Send a job to the child, which is started where there is none."""
        if self._child is not None and not self._unread and self._child.ended:
            self._stop()  # killed from outside between two jobs
        child = self._child or self._start()
        self._write(child, line)
        return child

    def _write(self, child: ChildProcess, line: bytes) -> None:
        try:
            child.write(line, self._silence_s)
        except TimeoutError:
            raise self._silent(child) from None
        except BrokenPipeError:
            self._check_ready(child)
            raise self._failure(child) from None

    def _receive(self, child: ChildProcess) -> dict[str, Any]:
        self._check_ready(child)
        reply: dict[str, Any] = json.loads(self._read(child))
        return reply

    def _read(self, child: ChildProcess) -> bytes:
        """The child's next line; raises the job's error where it has ended, or is silent."""
        try:
            line = child.read_line(self._silence_s)
        except TimeoutError:
            raise self._silent(child) from None
        if not line:
            raise self._failure(child)
        return line

    def _check_ready(self, child: ChildProcess) -> None:
        """Wait for the child's first line, which reports that it is ready."""
        if not child.ready:
            child.greet(self._read(child))

    def _start(self) -> ChildProcess:
        child = self._child = ChildProcess(self.library, self.memory_bytes)
        self._unread = 0
        if self._prelude is not None:
            self._write(child, line_of(self._prelude, self.seconds))
            self._unread += 1
        return child

    def _failure(self, child: ChildProcess, error: WorkerError | None = None) -> Exception:
        """The error of a job whose child has ended, or is ended because of an error."""
        self._stop()
        return child.failure(error)

    def _silent(self, child: ChildProcess) -> Exception:
        return self._failure(child, WorkerError("killed", "no answer"))

    def _stop(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None


def blocking(work: Callable[P, Coroutine[Any, Any, Result]]) -> Callable[P, Result]:
    """Make a plain function of a coroutine function that never suspends.

    Its only awaits are of an `Ask` that blocks, such as `Worker.ask_blocking`.
    """

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            work(*args, **kwargs).send(None)
        except StopIteration as end:
            result: Result = end.value
            return result
        raise RuntimeError(f"{work.__name__} waits, and no event loop runs it")

    return run
