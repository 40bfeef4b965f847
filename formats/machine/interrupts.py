"""Ctrl-C, which comes to all processes of a terminal's group."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Keep Ctrl-C from a process that is started in the block, until it says otherwise.

    It comes to the whole group, and would end the imports of the new process with a traceback.
    """
    if sys.platform == "win32":
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
