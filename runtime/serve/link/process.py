"""The process of the engine: it loads the model, serves it, and ends with the server."""

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
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from lowbit.formats.errors import ResourceError
from lowbit.formats.machine.interrupts import interrupts_blocked
from lowbit.formats.machine.parent import end_with_parent
from lowbit.formats.machine.system import explained
from lowbit.formats.printable import printable
from lowbit.runtime.serve.errors import of_bug
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.messages import (
    Facts,
    FromEngine,
    NotLoaded,
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
    """A process that serves a model over a channel."""

    process: BaseProcess
    channel: Channel[FromEngine]

    def facts(self) -> Facts:
        """Wait until the model has been loaded; errors as in `loaded`."""
        return asyncio.run(self.loaded())

    async def loaded(self) -> Facts:
        """Wait until the model has been loaded; a task that is cancelled ends the process.

        Raises:
            LowbitError: it could not be loaded; the process has ended.
        """
        try:
            first = await _first(self.channel)
        except BaseException:  # Ctrl-C
            self.kill()
            raise
        if isinstance(first, Facts):
            return first
        self.stop()
        if isinstance(first, NotLoaded):
            error = first.problem.error()
            error.add_note(first.trace)  # which --debug shows
            raise error
        raise ResourceError(
            f"the engine's process ended while it loaded the model: {self.ending}",
            hint="a process that the system killed had too little memory",
        )

    @property
    def ending(self) -> str:
        """End of the process, in words."""
        code = self.process.exitcode
        if code is None:
            return "it still runs"
        if code >= 0:
            return f"exit status {code}"
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
        return f"signal {-code}"

    def stop(self) -> bool:
        """Let the process end after its step; False if it hangs and had to be killed."""
        self.channel.close()
        self.process.join(STOP_S + 2.0)
        if self.process.exitcode is not None:
            return True
        log.error("the engine's process hangs, and is killed")
        self.kill()
        return False

    def kill(self) -> None:
        """End the process at once."""
        self.channel.close()
        self.process.kill()
        self.process.join()


def start_engine(load: "Callable[[], Model]") -> EngineProcess:
    """Start a process that loads a model and serves it.

    Args:
        load: loads the model there; picklable.
    """
    ours, theirs = socket.socketpair()
    context = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
    # The system ends the process with the thread that starts it, not only with the server.
    forever = threading.current_thread() is threading.main_thread()
    process = context.Process(target=_run, args=(theirs, load, forever), name="lowbit-engine")
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # whose start would let signals through again
    with theirs, interrupts_blocked():
        process.start()
    return EngineProcess(process, Channel(ours, FromEngine))


async def _first(channel: Channel[FromEngine]) -> FromEngine | None:
    async with contextlib.aclosing(channel.receive()) as messages:
        async for message in messages:
            return message
    return None


def _run(sock: socket.socket, load: "Callable[[], Model]", follows: bool) -> None:
    """Load the model and serve it until the other end closes; follows: it ends with the parent."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server has them too; answers may finish
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # for processes of its own
    parent = multiprocessing.parent_process()
    # Elsewhere than on Linux the end of the channel says so.
    if follows and not end_with_parent(None if parent is None else parent.pid):
        return
    channel: Channel[ToEngine] = Channel(sock, ToEngine)
    set_up_logs()
    ended = False
    try:
        ended = _serve(channel, load)
    finally:
        logging.shutdown()  # multiprocessing leaves such things out
        sys.stderr.flush()
    if not ended:
        os._exit(1)  # the interpreter would wait for the thread that hangs


def _serve(channel: Channel[ToEngine], load: "Callable[[], Model]") -> bool:
    """Load the model and serve it; False if the engine hangs at the end."""
    try:
        model = load()
    except BaseException as error:
        found = explained(error, GPU_HINT)
        if found is None:
            log.exception("the model could not be loaded")
            found = of_bug(error)
        trace = printable("".join(traceback.format_exception(error)), keep="\n")
        channel.send(NotLoaded(problem_of(found), trace))
        return True
    from lowbit.runtime.serve.link.host import EngineHost  # needs torch, as the loaded model does

    gc.collect()
    gc.freeze()  # a full collection takes 0.2 s to look through libraries, beside all streams
    try:
        return asyncio.run(EngineHost(model).serve([channel]))
    finally:
        model.close()
        if model.vision is not None:
            model.vision.stop()
