"""A child process for work whose time and memory a file controls.

A chat template, a regular expression or a grammar can loop for ever, fill the memory or overflow
the stack, and none can be stopped inside this process. The child (`child.py`) has limits of time
and memory and none of the environment's secrets; it is started once, and answers a job in a
fraction of a millisecond. A failure to start it is a ResourceError, not an error of the file.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from lowbit.formats.errors import ResourceError

SECONDS = 5.0  # time limit of a job; real ones take milliseconds
MEMORY_BYTES = 512 << 20  # address space; Python and jinja2 take 40 MB of it
# Environment variables that the child gets: paths of libraries, and the time zone.
KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME")
CHILD = Path(__file__).with_name("child.py")

Library = Literal["jinja2", "tokenizers", "llguidance"]
Ask = Callable[[Mapping[str, Any]], Awaitable[Any]]  # gives a job to a child
P = ParamSpec("P")
Result = TypeVar("Result")
FailureKind = Literal["syntax", "failed", "memory", "output", "time", "died", "killed"]
# Signals that a job cannot bring about: neither its limits nor a crash send them. The rest of a
# process's ends are the job's: an abort for want of memory, a full stack, a timer.
OUTSIDE = frozenset(("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"))


class WorkerError(Exception):
    """A job that failed; callers turn it into an error that names the file.

    Attributes:
        kind: `syntax` for a template or tokenizer that cannot be read, `failed` for an exception,
            `memory`, `output` and `time` for a limit, `died` for a process that ended by itself,
            `killed` for one that was ended from outside: no fault of the job, which is done once
            more.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        """Keep the kind and the reason."""
        super().__init__(message)
        self.kind = kind


class Worker:
    """A child process, started with the first job and again after a job that ended it.

    Attributes:
        seconds: default time limit of a job.
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
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes]], Worker] | None = None
        self._ready = False  # the child has reported that it is ready
        self._unread = 0  # replies that nobody waits for

    def submit(self, job: Mapping[str, Any]) -> None:
        """Begin a job without waiting for its reply, as a preparation for later jobs.

        A failure is not reported here; the next `ask` meets it again.

        Raises:
            TypeError: the job is not plain JSON; also ValueError, RecursionError.
        """
        line = line_of(job, self.seconds)
        with self._lock, contextlib.suppress(WorkerError, ResourceError), self._whole():
            self._send(line)
            self._unread += 1

    def ask(self, job: Mapping[str, Any], seconds: float | None = None) -> Any:
        """Run a job and return its result.

        Args:
            job: plain JSON, as `child.Handler` understands it.
            seconds: limit of this job; None for the worker's own.

        Raises:
            WorkerError: the job fails, or breaks a limit.
            ResourceError: the process cannot be started, or was killed twice.
            TypeError: the job is not plain JSON; also ValueError, RecursionError.
        """
        line = line_of(job, self.seconds if seconds is None else seconds)
        try:
            return value_of(self._reply(line))
        except WorkerError as error:
            if error.kind != "killed":
                raise
        try:
            return value_of(self._reply(line))
        except WorkerError as error:
            raise (killed(self.library, error) if error.kind == "killed" else error) from None

    def _reply(self, line: bytes) -> dict[str, Any]:
        with self._lock, self._whole():
            self._send(line)
            while self._unread:
                self._receive()
                self._unread -= 1
            return self._receive()

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

    def _send(self, line: bytes) -> None:
        if self._process is not None and not self._unread and self._process.poll() is not None:
            self._stop()  # killed from outside between two jobs
        if self._process is None:
            self._start()
        process = self._process
        if process is None or process.stdin is None:
            raise ResourceError("no process can be started")
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            self._check_ready()
            raise self._ended() from None

    def _receive(self) -> dict[str, Any]:
        self._check_ready()
        line = self._read()
        if line is None:
            raise self._ended()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _read(self) -> bytes | None:
        """Read the child's next line; None if it has ended."""
        if self._process is None or self._process.stdout is None:
            return None
        line = self._process.stdout.readline()
        return line if line.endswith(b"\n") else None

    def _check_ready(self) -> None:
        """Wait for the child's first line, which reports that it is ready."""
        if self._ready:
            return
        line = self._read()
        reason = str(self._ended()) if line is None else json.loads(line).get("message")
        if reason is not None:
            raise not_started(self.library, reason)
        self._ready = True

    def _start(self) -> None:
        process = start_child(self.library, self.memory_bytes)
        self._process, self._ready, self._unread = process, False, 0
        self._end = weakref.finalize(self, end_child, process)
        if self._prelude is not None:
            self._send(line_of(self._prelude, self.seconds))
            self._unread += 1

    def _ended(self) -> WorkerError:
        """The error for a process that has ended."""
        code = self._process.wait() if self._process is not None else 0
        self._stop()
        return error_of_end(code)

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


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


def start_child(library: Library, memory_bytes: int) -> subprocess.Popen[bytes]:
    """Start a child; its first line reports that it is ready, an object with a `message` otherwise.

    Raises:
        ResourceError: it cannot be started.
    """
    options = {"path": [p for p in sys.path if p], "library": library, "memory_bytes": memory_bytes}
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    try:
        return subprocess.Popen(
            # -I and -S: no user site, no start-up files; sys.path is this process's.
            [sys.executable, "-I", "-S", str(CHILD), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=environment | {"TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is for this process
        )
    except OSError as error:
        raise ResourceError(f"no process can be started: {error.strerror}") from None


def not_started(library: Library, reason: str) -> ResourceError:
    """The error for a child that cannot do any job."""
    return ResourceError(f"the process that runs {library} cannot start: {reason}")


def error_of_end(code: int) -> WorkerError:
    """The error for a child that has ended."""
    if code in (-signal.SIGALRM, -signal.SIGPROF):
        return WorkerError("time", "out of time")
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return WorkerError("killed" if name in OUTSIDE else "died", name)


def killed(library: Library, error: WorkerError) -> ResourceError:
    """The error for a job whose process was killed twice."""
    return ResourceError(
        f"the process that runs {library} was ended from outside twice ({error})",
        hint="try again; a system that is short of memory ends processes",
    )


def value_of(reply: Mapping[str, Any]) -> Any:
    """The result of a job; raises the WorkerError of one that failed."""
    if "error" in reply:
        kind, message = reply["error"], reply["message"]
        raise WorkerError("killed" if kind == "died" and message in OUTSIDE else kind, message)
    return reply["value"]


def line_of(job: Mapping[str, Any], seconds: float) -> bytes:
    """A job as the child reads it; raises TypeError, ValueError or RecursionError for others."""
    return json.dumps({"seconds": seconds, **job}).encode() + b"\n"


def end_child(process: "subprocess.Popen[bytes]") -> None:
    """End a child and close its pipes."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()  # may hold unread jobs
    process.wait()
