"""The server's log: a line a request on stderr, without prompts."""

import logging
import os
import sys
import threading
from collections import deque

from lowbit.formats.printable import printable

MOST_WAITING_BYTES = 1 << 20  # of lines that nobody has read yet
FLUSH_S = 1.0
LOGGERS = (
    ("lowbit.serve", logging.INFO),
    ("uvicorn.error", logging.WARNING),
    ("asyncio", logging.WARNING),
)


class Line(logging.Formatter):
    """Time and message; control characters of what clients sent become escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback below it if there is one."""
        text = f"{self.formatTime(record, '%H:%M:%S')} {printable(record.getMessage())}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class ThreadedHandler(logging.Handler):
    """Writes lines in a thread of its own: a pipe that nobody reads would stop the event loop.

    Lines that find too many others waiting are dropped, and counted.
    """

    def __init__(self, descriptor: int) -> None:
        """Start the thread.

        Args:
            descriptor: of an open file.
        """
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
            if self._dropped:
                self._append(b"%d lines of the log were dropped here\n" % self._dropped)
                self._dropped = 0
            self._append(line)
            self._changed.notify_all()

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
                line = self._waiting.popleft()
            left = line
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:  # the reader is gone, and no place is left to say so
                pass
            with self._changed:
                self._bytes -= len(line)
                self._changed.notify_all()


def set_up_logs() -> None:
    """Write the messages of the server, of uvicorn and of asyncio to stderr."""
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
