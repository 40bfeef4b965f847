"""Processes of a server, and that of the engine: it loads the model, and ends with the server."""

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from lowbit.formats.errors import ResourceError
from lowbit.formats.machine.interrupts import interrupts_blocked
from lowbit.formats.machine.parent import end_with_parent
from lowbit.formats.printable import printable
from lowbit.runtime.serve.errors import of_failure
from lowbit.runtime.serve.link.channel import Channel, Received
from lowbit.runtime.serve.link.messages import (
    Facts,
    FromEngine,
    NotStarted,
    ToEngine,
    problem_of,
)
from lowbit.runtime.serve.logs import set_up_logs
from lowbit.runtime.serve.settings import STOP_S

if TYPE_CHECKING:
    from lowbit.runtime.engine.model import Model

log = logging.getLogger("lowbit.serve")
GPU_HINT = "use a smaller --context"  # where the GPU has too little memory


@dataclass(slots=True)
class EngineProcess:
    """A process that serves a model over a channel.

    Attributes:
        others: ends of further channels, for other HTTP sides.
    """

    process: BaseProcess
    channel: Channel[FromEngine]
    others: list[socket.socket] = field(default_factory=list)

    def facts(self) -> Facts:
        """Wait until the model has been loaded; errors as in `loaded`."""
        return asyncio.run(self.loaded())

    async def loaded(self) -> Facts:
        """Wait until the model has been loaded; a task that is cancelled ends the process.

        Raises:
            LowbitError: it could not be loaded; the process has ended.
        """
        try:
            first = await first_of(self.channel)
        except BaseException:  # Ctrl-C
            self.kill()
            raise
        if isinstance(first, Facts):
            return first
        self.stop()
        if isinstance(first, NotStarted):
            raise first.error()
        raise ResourceError(
            f"the engine's process ended while it loaded the model: {self.ending}",
            hint="a process that the system killed had too little memory",
        )

    @property
    def ending(self) -> str:
        """End of the process, in words."""
        return ending_of(self.process)

    def stop(self) -> bool:
        """Let the process end after its step; False if it hangs and had to be killed."""
        self._close()
        self.process.join(STOP_S + 2.0)
        if self.process.exitcode is not None:
            return True
        log.error("the engine's process hangs, and is killed")
        self.kill()
        return False

    def kill(self) -> None:
        """End the process at once."""
        self._close()
        self.process.kill()
        self.process.join()

    def _close(self) -> None:
        self.channel.close()
        for each in self.others:  # that nobody has taken
            each.close()


def ending_of(process: BaseProcess) -> str:
    """End of a process, in words."""
    code = process.exitcode
    if code is None:
        return "it still runs"
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def start_engine(load: "Callable[[], Model]", others: int = 0) -> EngineProcess:
    """Start a process that loads a model and serves it.

    Args:
        load: loads the model there; picklable.
        others: number of HTTP sides beside the caller.
    """
    pairs = [socket.socketpair() for _ in range(1 + others)]
    ours = [each for each, _ in pairs]
    try:
        process = start_process(_run, [theirs for _, theirs in pairs], load, name="lowbit-engine")
    except BaseException:
        for each in ours:
            each.close()
        raise
    finally:
        for _, theirs in pairs:
            theirs.close()
    return EngineProcess(process, Channel(ours[0], FromEngine), ours[1:])


def start_process(target: Callable[..., None], *arguments: Any, name: str) -> BaseProcess:
    """Start a process of a server, which calls `begin_process` at first.

    Args:
        target: called there with the arguments, and True if the process is to end with this one.
        arguments: picklable.
        name: of the process.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
    # The system ends the process with the thread that starts it, not only with the server.
    forever = threading.current_thread() is threading.main_thread()
    process = context.Process(target=target, args=(*arguments, forever), name=name)
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # whose start would let signals through again
    with interrupts_blocked():
        process.start()
    return process


def begin_process(follows: bool) -> bool:
    """Leave signals to the process that started this one, end with it if it `follows`, and log.

    Returns:
        False where that one has ended meanwhile.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the server has them too; answers may finish
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # for processes of its own
    parent = multiprocessing.parent_process()
    # Elsewhere than on Linux the end of the channel says so.
    if follows and not end_with_parent(None if parent is None else parent.pid):
        return False
    set_up_logs()
    return True


def flush_logs() -> None:
    """Write what is left of the log: a process of multiprocessing runs no exit handlers."""
    logging.shutdown()
    sys.stderr.flush()


def not_started(error: BaseException, what: str, gpu_hint: str | None = None) -> NotStarted:
    """The message of a process that cannot do its work; arguments as for `of_failure`."""
    trace = printable("".join(traceback.format_exception(error)), keep="\n")
    return NotStarted(problem_of(of_failure(error, what, gpu_hint)), trace)


async def first_of(channel: Channel[Received]) -> Received | None:
    """The first message of a channel; None if it ends without one."""
    async with contextlib.aclosing(channel.receive()) as messages:
        async for message in messages:
            return message
    return None


def _run(socks: Sequence[socket.socket], load: "Callable[[], Model]", follows: bool) -> None:
    """Load the model and serve it until the other ends close; follows: it ends with the parent."""
    if not begin_process(follows):
        return
    channels = [Channel[ToEngine](each, ToEngine) for each in socks]
    ended = False
    try:
        ended = _serve(channels, load)
    finally:
        flush_logs()
    if not ended:
        os._exit(1)  # the interpreter would wait for the thread that hangs


def _serve(channels: Sequence[Channel[ToEngine]], load: "Callable[[], Model]") -> bool:
    """Load the model and serve it; False if the engine hangs at the end.

    Args:
        channels: the first one is told why the model could not be loaded.
        load: loads the model.
    """
    try:
        model = load()
    except BaseException as error:
        channels[0].send(not_started(error, "the model could not be loaded", GPU_HINT))
        return True
    from lowbit.runtime.serve.link.host import EngineHost  # needs torch, as the loaded model does

    gc.collect()
    gc.freeze()  # a full collection takes 0.2 s to look through libraries, beside all streams
    try:
        return asyncio.run(EngineHost(model).serve(channels))
    finally:
        model.close()
        if model.vision is not None:
            model.vision.stop()
