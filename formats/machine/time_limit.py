"""A limit of time for work that a file decides, such as matching its patterns."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lowbit.formats.errors import FormatError

PATTERN_SECONDS = 5.0  # thousands of patterns on hundreds of modules take less than one


class _TimeOverError(Exception):
    """The time is over."""


@contextmanager
def time_limit(what: str, seconds: float = PATTERN_SECONDS) -> Iterator[None]:
    """Stop the block after some time; `re` looks for signals while it searches.

    Signals reach the main thread alone, so a block in another thread runs without a limit. So does
    one where somebody's alarm is running already: there is one for the whole process.

    Args:
        what: the work, for the message.
        seconds: wall time it may take.

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
