"""Entry of a command: signals become exit codes from the first import on.

This module imports small parts of the standard library only, so that the handlers are in place
before anything slow.
"""

import importlib
import os
import select
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import IO, NoReturn

INTERRUPTED = 128 + signal.SIGINT
READER_LEFT = 128 + 13  # SIGPIPE, a name that Windows lacks
# An import can swallow an interrupt: a C extension may report another error or none, and a library
# may go on without the module. The interrupt is therefore raised again until it gets through.
MASKS = (ImportError, SystemError)
AGAIN_S = 0.05


def run(module: str, program: str) -> NoReturn:
    """Import a module and call its `main`.

    The exit code is 130 after SIGINT and 143 after SIGTERM. Both unwind the stack, so that open
    files are closed and temporary ones removed. On Windows it is 1, with a message.

    Args:
        module: dotted name.
        program: name of the command for messages.
    """
    _check_system()
    if hasattr(sys.stdout, "reconfigure"):  # escape characters that the encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    arrived: list[int] = []
    _watch(arrived)
    try:
        importlib.import_module(module).main(prog_name=program)
    except KeyboardInterrupt:
        arrived.append(signal.SIGINT)
    except MASKS:
        if not arrived:
            raise
    else:
        sys.exit(0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # cleaned up already
    if arrived[-1] == signal.SIGINT:
        farewell()
    sys.exit(128 + arrived[-1])


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


def farewell(left: str = "", fold: Callable[[str], str] = str) -> None:
    """Print that the user has interrupted the command.

    Args:
        left: text on files that remain, if any.
        fold: puts line ends between words where they are due.
    """
    print(f"\n{fold(f'interrupted; {left}' if left else 'interrupted')}", file=sys.stderr)


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


def _watch(arrived: list[int]) -> None:
    """Raise KeyboardInterrupt at SIGINT and SystemExit at SIGTERM, unless they are ignored.

    A second SIGINT does not disturb what cleans up after the first; a third one ends the process.

    Args:
        arrived: list that every received signal's number is appended to.
    """
    impatient: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        arrived.append(signal.SIGINT)
        if _is_on_its_way(sys.exception()):
            impatient.append(number)
            if len(impatient) > 1:
                _stop_at_once()
            return
        if _is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        raise KeyboardInterrupt

    def insist(number: int, frame: FrameType | None) -> None:
        if arrived and not _is_on_its_way(sys.exception()):
            interrupt(number, frame)

    def terminate(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        sys.exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGALRM, insist)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)


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
