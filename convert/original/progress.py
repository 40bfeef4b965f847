"""Progress of long work, as whoever watches is told of it."""

from collections.abc import Callable
from threading import Lock

# Phase, done and in all: bytes of "source", "check", "convert", "verify", "derive" and "export",
# weights of "calibrate", "prove" and "dequantized", tokens of "answer", steps of "train", layers of
# "states"; of the others some measure of work.
Progress = Callable[[str, int, int], None]
Advance = Callable[[int], None]  # work done since the last call
Note = Callable[[str], None]  # a line for whoever started the work


def silent(phase: str, done: int, total: int) -> None:
    """Tell nobody."""


def unsaid(text: str) -> None:
    """Note nothing."""


class Meter:
    """Adds up the work of one phase, from any thread, and tells of it."""

    def __init__(self, progress: Progress, phase: str, total: int, done: int = 0) -> None:
        """Begin after some work that an earlier run has done."""
        self._progress, self._phase, self._total, self._done = progress, phase, total, done
        self._lock = Lock()

    def add(self, work: int) -> None:
        """Tell of more work that is done."""
        with self._lock:
            self._done += work
            self._progress(self._phase, self._done, self._total)
