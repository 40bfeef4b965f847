"""Entry of a command: signals become exit codes from the first import on.

This module imports small parts of the standard library only, so that the handlers are in place
before anything slow.
"""

import importlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import IO, NoReturn

INTERRUPTED = 128 + signal.SIGINT
READER_LEFT = 128 + 13  # SIGPIPE, a name that Windows lacks
AGAIN_S = 0.02
PATIENCE_S = 1.0  # that an import may still take after a signal
FAREWELL = "interrupted"


def run(module: str, program: str) -> NoReturn:
    """Import a module and call its `main`.

    The exit code is 130 after SIGINT and 143 after SIGTERM. Both unwind the stack, so that open
    files are closed and temporary ones removed. On Windows it is 1, with a message.
    """
    _check_system()
    open_closed()
    if hasattr(sys.stdout, "reconfigure"):  # escape characters that the encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    signals = Signals()
    signals.watch()
    try:
        try:
            main = importlib.import_module(module).main
            signals.deliver()
            main(prog_name=program)
        finally:  # what the timer raises here is still handled below
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        signals.arrived.append(signal.SIGINT)
    except BaseException:
        if signals.waiting is None:
            raise
    else:
        if signals.waiting is None:
            sys.exit(0)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # all is cleaned up already
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: os._exit(128 + number))
        _flush()
    if signals.arrived[-1] == signal.SIGINT:
        farewell()
    sys.exit(128 + signals.arrived[-1])


def _check_system() -> None:
    """End on a system that no command runs on, before anything fails there for want of a call."""
    if sys.platform != "win32":
        return
    from lowbit.formats.errors import LowbitError
    from lowbit.formats.machine.system import check_system

    try:
        check_system()
    except LowbitError as error:
        print(f"Error: {error}\n\nhint: {error.hint}", file=sys.stderr)
        sys.exit(1)


def open_closed() -> None:
    """Open the standard streams that the caller has closed, before a file takes their numbers.

    Nothing can be read, messages are lost, and results meet a reader who has left.
    """
    if sys.stdin is None:
        _place(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        read, write = os.pipe()
        os.close(read)
        _place(write, 1)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        _place(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _place(descriptor: int, wanted: int) -> None:
    """Give a file another number, by which processes of this one have it, too."""
    if descriptor == wanted:
        os.set_inheritable(wanted, True)
    else:
        os.dup2(descriptor, wanted)
        os.close(descriptor)


def farewell(left: str = "", fold: Callable[[str], str] = str) -> None:
    """Print that the user has interrupted the command.

    Args:
        left: text on files that remain, if any.
        fold: puts line ends between words where they are due.
    """
    print(f"\n{fold(f'{FAREWELL}; {left}' if left else FAREWELL)}", file=sys.stderr)


def _flush() -> None:
    """Write what stdout still holds, if anybody reads it: the end of Python would complain."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        leave(sys.stdout)


def leave(stream: IO[str]) -> None:
    """Redirect a stream to the null device after its reader has left, so that flushes succeed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def leave_broken() -> bool:
    """Redirect stdout and stderr if their readers have left; True if one has."""
    streams = {stream.fileno(): stream for stream in (sys.stdout, sys.stderr)}
    watch = select.poll()
    for descriptor in streams:
        watch.register(descriptor, 0)
    broken = [streams[descriptor] for descriptor, _ in watch.poll(0)]
    for stream in broken:
        leave(stream)
    return bool(broken)


class Signals:
    """SIGINT and SIGTERM as exceptions, which are never raised inside an import.

    Half of an import is C and C++ code that calls Python: it may abort at an exception, replace it
    by another one, or go on without what it was loading. A signal waits for the end of the import,
    and ends the process where the import takes longer than PATIENCE_S.

    Attributes:
        arrived: numbers of all signals so far.
        waiting: number of the signal that waits for the end of an import, or None.
    """

    def __init__(self) -> None:
        """Handle nothing yet."""
        self.arrived: list[int] = []
        self.waiting: int | None = None
        self._deadline = 0.0  # for the import
        self._impatient = 0  # interrupts that came while another one was under way

    def watch(self) -> None:
        """Handle SIGINT and SIGTERM from now on, unless they are ignored."""
        usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        for number, handler in usual.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, self._take)
                signal.signal(signal.SIGALRM, self._insist)

    def deliver(self) -> None:
        """Raise the signal that waits, if one does."""
        number, self.waiting = self.waiting, None
        if number is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _raise(number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; a second SIGINT disturbs no clean-up, a third one ends the process."""
        self.arrived.append(number)
        waits = self.waiting is not None
        if number == signal.SIGINT and (waits or _is_on_its_way(sys.exception())):
            self._impatient += 1
            if self._impatient > 1:
                _stop_at_once()
            return
        if not _is_importing(frame):
            _raise(number)
        if not waits:
            self._deadline = time.monotonic() + PATIENCE_S
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
        self.waiting = number

    def _insist(self, _: int, frame: FrameType | None) -> None:
        """Raise the signal that waits, once no import is under way."""
        if not _is_importing(frame):
            self.deliver()
        elif self.waiting is not None and time.monotonic() > self._deadline:
            if self.waiting == signal.SIGINT:
                os.write(2, f"\n{FAREWELL}\n".encode())
            os._exit(128 + self.waiting)


def _raise(number: int) -> NoReturn:
    """Unwind the stack for a signal."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _stop_at_once() -> NoReturn:
    """End without cleaning up, but for the cursor that progress bars hide."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\r\n")
    os._exit(INTERRUPTED)


def _is_importing(frame: FrameType | None) -> bool:
    """Tell if a frame runs inside an import."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _is_on_its_way(error: BaseException | None) -> bool:
    """Tell if an interrupt is already being handled, by clean-up code for instance."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
