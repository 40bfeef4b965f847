"""The server's log on stderr: one line for each request, without its prompt."""

import logging
import os
import re
import secrets
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lowbit.formats.printable import printable
from lowbit.runtime.engine.delta import End
from lowbit.runtime.engine.stats import Tally
from lowbit.runtime.serve.errors import cut
from lowbit.runtime.text.answer import Event, Piece, ToolCallStart

MOST_ERROR_CHARACTERS = 300
LEFT_OUT = b"x-lowbit-left-out"
REQUEST_ID = b"x-request-id"
KNOWN_ID = re.compile(rb"[\w.:/+=-]{1,64}")  # ids that clients may choose
MOST_NAMES = 16  # in this header
MOST_NAME = 80  # characters of one


@dataclass(slots=True)
class Record:
    """Facts of one request, for its line of the log, the metrics, and the way it is prepared."""

    client: str = ""  # who asks, by `auth.client_of`; not logged
    id: str = ""  # see `id_of`; a header and every line of the log name it
    short: bool = False  # the event loop may prepare it, see `request.prepare`
    # Time of its first byte, by `time.perf_counter`
    started: float = field(default_factory=time.perf_counter)
    status: int = 0  # of the response, once it has begun
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    later_tokens: int = 0  # new tokens after the first step of their answer
    drafts: Tally = field(default_factory=Tally)
    # Seconds from the start to the first token, or to its text while no answer has ended; None
    # before it
    first_token_s: float | None = None
    # Seconds from the start to the last token of an answer that has ended
    last_token_s: float = 0.0
    reasons: list[str] = field(default_factory=list)
    error: str | None = None
    ignored: list[str] = field(default_factory=list)
    # Parts of the request that are skipped or not enforced; a header names them, too
    left_out: list[str] = field(default_factory=list)
    stream: bool = False
    prompts: list[str] = field(default_factory=list)
    # Text and calls of each answer, by its number, where the log shall have them
    answers: dict[int, str] = field(default_factory=dict)

    def add_end(self, end: End) -> None:
        """Count an answer that has ended."""
        self.reasons.append(end.reason)
        self.count(end)

    def count(self, end: End) -> None:
        """Count the tokens of an answer, also of one that was given up."""
        self.cached_tokens += end.cached_tokens
        self.new_tokens += end.new_tokens
        if end.speculation is not None:
            self.drafts.add(end.speculation)
        if end.new_tokens:
            first_s = end.first_at - self.started  # text may come much later
            self.first_token_s = min(first_s, self.first_token_s or first_s)
            self.last_token_s = max(end.last_at - self.started, self.last_token_s)
            self.later_tokens += end.new_tokens - end.first_tokens

    def leave_out(self, names: Iterable[str]) -> None:
        """Note parts of the request that are skipped or not enforced, each name once."""
        for name in dict.fromkeys(cut(name, MOST_NAME) for name in names):
            if name not in self.left_out and len(self.left_out) < MOST_NAMES:
                self.left_out.append(name)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the response: the request's id, and what was left out."""
        found = [(REQUEST_ID, self.id.encode())] if self.id else []
        if self.left_out:
            value = re.sub(r"[^\x20-\x7e]", "?", ", ".join(self.left_out))
            found.append((LEFT_OUT, value.encode()))
        return found

    def add_text(self, index: int, events: Sequence[Event]) -> None:
        """Append the text of events to an answer."""
        for event in events:
            if isinstance(event, Piece):
                text = event.text
            elif isinstance(event, ToolCallStart):
                text = f" {event.name} "
            else:
                text = event.fragment
            self.answers[index] = self.answers.get(index, "") + text

    @property
    def text(self) -> list[str]:
        """Lines of the log with prompts and answers."""
        answers = [f"answer {index}: {text}" for index, text in sorted(self.answers.items())]
        return [*(f"prompt: {text}" for text in self.prompts), *answers]

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def line(self, method: str, path: str, status: int) -> str:
        """The line of the log for this request."""
        whole = self.seconds
        parts = [f"{method} {cut(path)} {status} {whole * 1e3:.1f} ms"]
        if self.prompt_tokens:
            cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
            parts.append(f"prompt {self.prompt_tokens}{cached}, new {self.new_tokens}")
        if self.first_token_s is not None:
            parts.append(f"first token {self.first_token_s * 1e3:.1f} ms")
            rest = self.last_token_s - self.first_token_s
            if self.later_tokens and rest > 0:
                parts.append(f"{self.later_tokens / rest:.0f} tok/s")
        if self.drafts.rounds:
            parts.append(self.drafts.speculated.words)
        if self.reasons:
            parts.append("+".join(self.reasons))
        if self.stream:
            parts.append("streamed")
        if self.ignored:
            parts.append("ignored " + " ".join(self.ignored))
        if self.left_out:
            parts.append("left out " + " and ".join(self.left_out))
        if self.id:
            parts.append(f"id {self.id}")
        if self.error is not None:
            parts.append(cut(self.error, MOST_ERROR_CHARACTERS))
        return ", ".join(parts)


def id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Id of a request: the one that its client sends, if it can stand in a line, or a new one."""
    for name, value in headers:
        if name == REQUEST_ID and KNOWN_ID.fullmatch(value):
            return value.decode()
    return secrets.token_hex(6)


MOST_WAITING_BYTES = 1 << 20  # of lines that are not written yet
# Most bytes that a pipe takes in one piece; POSIX promises 512
ATOMIC_BYTES = getattr(select, "PIPE_BUF", 512)
FLUSH_S = 1.0
GATHER_S = 0.01  # lines that come in it are written together: a thread's wake costs as much as two
LOGGERS = (
    ("lowbit.serve", logging.INFO),
    ("uvicorn.error", logging.WARNING),
    ("asyncio", logging.WARNING),
)


class Line(logging.Formatter):
    """Format a line as time and message; control characters that clients sent become escapes."""

    _second, _time = 0, ""  # of the last line

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it if there is one."""
        if int(record.created) != self._second:
            self._second, self._time = int(record.created), self.formatTime(record, "%H:%M:%S")
        text = f"{self._time} {printable(record.getMessage())}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class ThreadedHandler(logging.Handler):
    """Writes lines in a thread of its own: a pipe that nobody reads would stop the event loop.

    Beyond MOST_WAITING_BYTES of unwritten lines, further lines are dropped and counted.
    """

    def __init__(self, descriptor: int) -> None:
        """Start the thread."""
        super().__init__()
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # of lines that are not written
        self._dropped = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line to the thread."""
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        with self._changed:
            if self._bytes and self._bytes + len(line) > MOST_WAITING_BYTES:
                self._dropped += 1
                return
            if not self._waiting:  # else the thread has been told
                self._changed.notify_all()
            if self._dropped:
                self._append(b"%d lines of the log were dropped here\n" % self._dropped)
                self._dropped = 0
            self._append(line)

    def flush(self) -> None:
        """Wait until every line is written, a second at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes, FLUSH_S)

    def _append(self, line: bytes) -> None:
        self._waiting.append(line)
        self._bytes += len(line)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
            time.sleep(GATHER_S)
            with self._changed:
                left = b"".join(self._waiting)
                self._waiting.clear()
            written = 0
            while written < len(left):
                piece = memoryview(left)[written : end_of_piece(left, written)]
                try:
                    count = os.write(self._descriptor, piece)
                except OSError:  # the reader is gone, and no place is left to say so
                    count = len(left) - written
                written += count
                with self._changed:
                    self._bytes -= count
                    self._changed.notify_all()


def end_of_piece(lines: bytes, first: int) -> int:
    """End of whole lines that a pipe takes without those of another process between them.

    A longer line is a piece by itself.
    """
    if len(lines) - first <= ATOMIC_BYTES:
        return len(lines)
    last = lines.rfind(b"\n", first, first + ATOMIC_BYTES)
    if last < 0:
        last = lines.find(b"\n", first)
    return last + 1 or len(lines)


def set_up_logs() -> None:
    """Write the messages of the server, of uvicorn and of asyncio to stderr."""
    # No line names these, and to look them up takes a third of a line's time.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = _handler()
    handler.setFormatter(Line())
    for name, level in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


def _handler() -> logging.Handler:
    try:
        sys.stderr.flush()
        return ThreadedHandler(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # no file: closed, or a test's
        return logging.StreamHandler(sys.stderr)
