"""A child process that does jobs for `Worker` or `JobQueue`: its start, its end, its messages.

`failure_of` decides whether a job whose child has ended is done once more.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal, cast

from lowbit.formats.errors import ResourceError

SECONDS = 5.0  # of the processor that a job may take; real ones take milliseconds
# Beside them, until a child that says nothing is ended: it may start, or wait for a processor
SILENT_S = 10.0
READ_BYTES = 1 << 16
MEMORY_BYTES = 512 << 20  # address space; Python and jinja2 take 40 MB of it
# Environment variables that the child gets: paths of libraries, and the time zone.
KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME")
CHILD = Path(__file__).with_name("child.py")

Library = Literal["jinja2", "tokenizers", "llguidance"]
FailureKind = Literal["syntax", "failed", "memory", "output", "time", "died", "killed"]
# Signals that a job cannot bring about: neither its limits nor a crash send them. The rest of a
# process's ends are the job's: an abort for want of memory, a full stack, a timer.
OUTSIDE = frozenset(("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"))


class WorkerError(Exception):
    """A job that failed; callers turn it into an error that names the file.

    Attributes:
        kind: `syntax` for a template or tokenizer that cannot be read, `failed` for an exception,
            `memory`, `output` and `time` for a limit, `died` for a process that ended by itself,
            `killed` for one that was ended, or stopped, from outside.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        """Keep the kind and the reason."""
        super().__init__(message)
        self.kind = kind


class ChildProcess:
    """A child that has been started, and ends with this object.

    Attributes:
        process: its pipes belong to this object.
        input: takes jobs, a line each.
        output: has its first line, and then a line for each job.
        ready: it has reported that it is.
    """

    def __init__(self, library: Library, memory_bytes: int) -> None:
        """Start a child.

        Args:
            library: does the jobs; the child imports it when it starts.
            memory_bytes: its address space.

        Raises:
            ResourceError: it cannot be started.
        """
        self.process, self.ready, self._library = start_child(library, memory_bytes), False, library
        self.input, self.output = pipes_of(self.process)
        for pipe in (self.input, self.output):
            os.set_blocking(pipe.fileno(), False)
        self._rest = b""  # behind the last line that was read
        self._end = weakref.finalize(self, end_child, self.process)

    @property
    def ended(self) -> bool:
        """True if it has been ended, or has ended by itself."""
        return self.process.poll() is not None

    def greet(self, line: bytes) -> None:
        """Take its first line.

        Raises:
            ResourceError: it cannot do any job.
        """
        reason = json.loads(line).get("message")
        if reason is not None:
            raise self._not_started(reason)
        self.ready = True

    def write(self, line: bytes, seconds: float) -> None:
        """Write a job, however long that takes while it reads.

        Raises:
            TimeoutError: it has read nothing for so many seconds.
            BrokenPipeError: it has ended.
        """
        left = memoryview(line)
        while left:
            try:
                left = left[os.write(self.input.fileno(), left) :]
            except BlockingIOError:
                wait_for(self.input, select.POLLOUT, seconds)

    def read_line(self, seconds: float) -> bytes:
        """Wait for its next line; empty if it has ended.

        Raises:
            TimeoutError: it has written nothing for so many seconds.
        """
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            wait_for(self.output, select.POLLIN, seconds)
            parts.append(os.read(self.output.fileno(), READ_BYTES))
            if not parts[-1]:
                return b""
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def end(self) -> None:
        """End it if it has not ended, and close its pipes."""
        self._end()

    def failure(self, error: WorkerError | None = None) -> WorkerError | ResourceError:
        """The error of the job at hand, once it has ended.

        Args:
            error: reason why it was ended; None where it has ended by itself.
        """
        if error is None:
            error = _error_of_end(self.process.returncode)
        if self.ready or error.kind == "killed":
            return error
        return self._not_started(str(error))

    def _not_started(self, reason: str) -> ResourceError:
        return ResourceError(f"the process that runs {self._library} cannot start: {reason}")


def failure_of(error: Exception, library: Library, retried: bool) -> Exception | None:
    """The error of a job that has failed; None where it is to be done once more.

    A job is not at fault where something else has killed or stopped its child, ready or not.

    Args:
        retried: the job has been done once more already.
    """
    if not (isinstance(error, WorkerError) and error.kind == "killed"):
        return error
    if not retried:
        return None
    return ResourceError(
        f"the process that runs {library} was ended or stopped from outside twice ({error})",
        hint="try again; a system that is short of memory ends processes",
    )


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
        raise ResourceError(
            f"no process can be started: {error.strerror}",
            hint="the machine may be short of memory, or the user have too many processes or open "
            "files: see `ulimit -a`",
        ) from None


def pipes_of(process: "subprocess.Popen[bytes]") -> tuple[IO[bytes], IO[bytes]]:
    """Standard input and output of a child, both of which are pipes."""
    return cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)


def wait_for(pipe: IO[bytes], event: int, seconds: float) -> None:
    """Wait until a pipe has room, or data; raises TimeoutError after so many seconds."""
    waiting = select.poll()
    waiting.register(pipe, event)
    if not waiting.poll(seconds * 1000):
        raise TimeoutError


def end_child(process: "subprocess.Popen[bytes]") -> None:
    """End a child, with the copy of it that may be at work, and close its pipes."""
    if process.poll() is None:  # else its number may be another's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its session is its own
    for pipe in pipes_of(process):
        with contextlib.suppress(OSError):
            pipe.close()  # may hold unread jobs
    process.wait()


def _error_of_end(code: int) -> WorkerError:
    """The error for a child that has ended."""
    if code == -signal.SIGPROF:
        return WorkerError("time", "out of time")
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return WorkerError("killed" if name in OUTSIDE else "died", name)


def value_of(reply: Mapping[str, Any]) -> Any:
    """The result of a job; raises the WorkerError of one that failed."""
    if "error" in reply:
        kind, message = reply["error"], reply["message"]
        raise WorkerError("killed" if kind == "died" and message in OUTSIDE else kind, message)
    return reply["value"]


def line_of(job: Mapping[str, Any], seconds: float) -> bytes:
    """A job as the child reads it; raises TypeError, ValueError or RecursionError for others."""
    return json.dumps({"seconds": seconds, **job}).encode() + b"\n"
