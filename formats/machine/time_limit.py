"""Time limit for work whose cost a file controls, such as matching its patterns."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lowbit.formats.errors import FormatError

PATTERN_SECONDS = 5.0  # thousands of patterns on hundreds of modules take less than a second


class _TimeOverError(Exception):
    """Raised in the block when the time is over."""


@contextmanager
def time_limit(what: str, seconds: float = PATTERN_SECONDS) -> Iterator[None]:
    """Stop the block after some time, by a signal; `re` checks for signals while it searches.

    Signals reach the main thread only, so a block in another thread runs without a limit. So does a
    block while another alarm is running, since a process has only one.

    Args:
        what: name of the work, for the message.

    Raises:
        FormatError: the time is over.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise _TimeOverError

    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeOverError:
        raise FormatError(
            f"{what} took longer than {seconds:g} s",
            hint="a pattern with nested repeats, `(.+)+` for instance, may take forever",
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
