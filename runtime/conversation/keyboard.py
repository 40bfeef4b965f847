"""The keyboard while an answer is made: Ctrl-C stops it, other keys wait for the prompt."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class Interrupt:
    """State of Ctrl-C during an answer; a stop between two tokens leaves the cache whole."""

    gentle: bool = False  # the first Ctrl-C only sets `pressed`; else it raises KeyboardInterrupt
    pressed: bool = False  # set by the first Ctrl-C; the second always raises

    def press(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT."""
        if self.pressed or not self.gentle:
            raise KeyboardInterrupt
        self.pressed = True


@contextmanager
def watched() -> Iterator[Interrupt]:
    """Take Ctrl-C as an `Interrupt` for a while, in the main thread, which alone receives it."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt.press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def unseen() -> Iterator[None]:
    """Keys typed meanwhile do not show between the words of an answer; the next prompt has them."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
