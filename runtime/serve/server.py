"""The uvicorn server: it listens, and ends at a signal once running requests have finished."""

import asyncio
import ctypes
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from lowbit.formats.errors import ResourceError
from lowbit.runtime.serve.app import App
from lowbit.runtime.serve.protocol import StartQueue, TimedProtocol
from lowbit.runtime.serve.service import Service
from lowbit.runtime.serve.settings import SWITCH_S

log = logging.getLogger("lowbit.serve")
BACKLOG = 512
KEEP_ALIVE_S = 75
MOST_FILES = 8192  # that the process may have open, if the system lets it
LARGE_BYTES = 8 << 20  # blocks of memory for pixels of more than a screen
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # settings of glibc's `mallopt`
TICK_S = 0.02
END_S = 2.0  # for threads to end, when the server ends
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def allow_connections() -> None:
    """Raise the limit of open files, often 1,024, so that the process can hold many connections."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_files() -> int:
    """Files that this process may have open, connections among them."""
    if sys.platform == "win32":
        return MOST_FILES
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def tune_process() -> None:
    """Prepare a process that speaks HTTP, once it has loaded what it needs."""
    gc.collect()
    gc.freeze()  # a full collection takes 0.2 s to look through libraries
    allow_connections()
    return_large_blocks()


def return_large_blocks() -> None:
    """Let large blocks of memory go back to the system once nothing holds them.

    Only glibc keeps them: two pictures of 81 million pixels left a process with 2 GB.
    """
    try:
        setting = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    setting(MMAP_THRESHOLD, LARGE_BYTES)
    setting(TRIM_THRESHOLD, 2 * LARGE_BYTES)  # as glibc itself sets it beside the other


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens.

    Raises:
        ResourceError: the address is taken, or is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ResourceError(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            hint="name another --port or --host",
        ) from None
    found.listen(BACKLOG)
    return found


class Server(uvicorn.Server):
    """Server that refuses new requests after a signal, and ends once no request is left.

    A second signal ends the process at once, whatever its threads do. The end of the engine, which
    is a bug, ends the server too, unless another engine follows it.
    """

    def __init__(
        self, app: App, service: Service, on_start: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare to serve."""
        settings = service.settings
        protocol: Any = partial(  # called like the class that uvicorn expects
            TimedProtocol,
            head_s=settings.head_timeout_s,
            stalled_s=settings.request_timeout_s,
            starts=StartQueue(),
        )
        config = uvicorn.Config(
            app,
            http=protocol,
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._service, self._on_start = service, on_start
        self._switch_s = sys.getswitchinterval()
        self._captured = False  # signals come to this server

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept requests; the event loop and threads that render prompts now switch more often."""
        await super().startup(sockets)
        sys.setswitchinterval(SWITCH_S)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests."""
        sys.setswitchinterval(self._switch_s)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Look whether the engine still runs, ten times a second."""
        service = self._service
        if not (service.engine.alive or service.draining or service.revive()):
            log.error("the server ends, as the engine has")
            return True
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at the first signal, end at the second; only the main thread gets signals."""
        loop = asyncio.get_running_loop()
        try:
            for number in SIGNALS:
                loop.add_signal_handler(number, self.drain)
        except (RuntimeError, ValueError):  # another thread
            yield
            return
        self._captured = True
        try:
            yield
        finally:
            self._captured = False
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def drain(self) -> None:
        """Refuse new requests and end after the running ones; at once if called twice."""
        service = self._service
        if service.draining:
            log.warning("ending at once")
            self.should_exit = self.force_exit = True
            return
        running = service.active - len(service.pending)
        service.drain()
        if self._captured:
            end_at_next_signal()
        log.warning("shutting down; requests that still run: %d", running)
        self._draining = asyncio.get_running_loop().create_task(self._drained())

    async def _drained(self) -> None:
        while self._service.active and not self.should_exit and not self._service.failing:
            await asyncio.sleep(TICK_S)
        engine = self._service.engine
        if not engine.alive:  # clients have been told to see the log
            log.error("the server ends, as the engine has; answers that it lost: %d", engine.lost)
        self.should_exit = True


def end_at_next_signal() -> None:
    """Restore the system's handlers, which end the process whatever its threads do."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)


def end_threads() -> bool:
    """Wait END_S for the threads of a server that has ended; False if one hangs."""
    deadline = time.monotonic() + END_S
    left = [thread for thread in threading.enumerate() if thread.name.startswith("lowbit-")]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = [thread.name for thread in left if thread.is_alive()]
    if hanging:
        log.error("threads that hang are left behind: %s", ", ".join(hanging))
    return not hanging
