"""Several HTTP processes before one engine, and the process that starts, feeds and ends them.

Connections come here, since the system would give most of them to one process: a listening socket
that two share gave one 63 of 64 connections, as asyncio accepts all that wait. With `SO_REUSEPORT`
another server of the same user could take half of them without a word.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess

from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.runtime.serve.http_worker import run_worker
from lowbit.runtime.serve.link.channel import Channel, SharedSocket
from lowbit.runtime.serve.link.engines import Engines
from lowbit.runtime.serve.link.messages import FromEngine, NotStarted
from lowbit.runtime.serve.link.process import ending_of, start_process
from lowbit.runtime.serve.link.workers import (
    AskCounts,
    AskOthers,
    Closed,
    Connect,
    CountsFound,
    Drain,
    DropOthers,
    End,
    Follow,
    FromWorker,
    Lost,
    OthersFound,
    Ready,
    Start,
)
from lowbit.runtime.serve.metrics import Counts
from lowbit.runtime.serve.server import END_S, SIGNALS, end_at_next_signal, most_files
from lowbit.runtime.serve.settings import STOP_S, ServeSettings
from lowbit.runtime.serve.siblings import new_totals

log = logging.getLogger("lowbit.serve")
MOST_ACCEPTED = 64  # connections in one turn of the event loop
RETRY_S = 0.5  # until connections are accepted again, where no process can take more
BEAT_S = 0.25  # between two questions to each process, of 83 us of a processor
# Beats until a process that has not answered, such as a stopped one, gets no connections, and until
# it is killed where the server ends. Times would count those at which this process is stopped, too
SILENT_BEATS = 2
HUNG_BEATS = 40
# Share of the files that a process may open, for its connections: one that has no room for a file
# that it is sent loses its channel
ROOM = 0.75


@dataclass(slots=True, eq=False)
class HttpProcess:
    """An HTTP process."""

    process: BaseProcess
    channel: Channel[FromWorker]
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # set at its end, too
    ended: bool = False
    given: int = 0  # connections so far
    connections: int = 0  # that are open
    asked: bool = False  # for its metrics, and has not answered yet
    silent_beats: int = 0  # that have passed since


@dataclass(slots=True)
class PendingCounts:
    """Metrics of all other processes that one has asked for."""

    missing: set[HttpProcess]
    counts: list[Counts] = field(default_factory=list)


class Supervisor:
    """Runs the HTTP processes of a server; all methods belong to the event loop.

    The first signal lets all finish their requests. A process that ends by itself ends the server
    once the others have finished theirs: a connection or a count of it is lost already, and whoever
    restarts servers hears of it. The end of the engine ends all, unless another one follows it.

    Attributes:
        room: connections that a process may have.
        draining: the server is ending.
        engine_ended: it ends because its engine has ended, or that lost answers at the end.
        error: reason why it ends; None for a signal or the end of the engine.
    """

    def __init__(self, settings: ServeSettings, listening: socket.socket, engines: Engines) -> None:
        """Prepare to serve by `settings.http_workers` processes.

        Args:
            settings: of the server.
            listening: where clients connect.
            engines: each has a channel for each process.
        """
        self.room = int(most_files() * ROOM)
        self.draining = self.engine_ended = False
        self.error: LowbitError | None = None
        self._settings, self._listening, self._engines = settings, listening, engines
        self._workers: list[HttpProcess] = []
        # By the process that has asked, and the number of its question
        self._pending: dict[tuple[HttpProcess, int], PendingCounts] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._draining_beats = 0

    async def serve(self, on_start: Callable[[], None]) -> None:
        """Serve until all processes have ended; `on_start` is called once they take connections.

        It is not called where the server ends before.
        """
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[None]] = []
        try:
            self._start_workers()  # a signal may interrupt it
            hearing = [asyncio.create_task(self._hear(each)) for each in self._workers]
            watching = (self._watch_engine(), self._beat())
            tasks = [*hearing, *(asyncio.create_task(each) for each in watching)]
            for each in self._workers:
                await each.ready.wait()
            if not self.draining:
                for number in SIGNALS:
                    loop.add_signal_handler(number, self._at_signal)
                self._listening.setblocking(False)
                loop.add_reader(self._listening, self._accept)
                on_start()
            await asyncio.wait(hearing)
        finally:
            if self._retry is not None:
                self._retry.cancel()
            loop.remove_reader(self._listening)
            for task in tasks:
                task.cancel()
            for each in self._workers:
                each.channel.close()
                each.process.kill()
                each.process.join()

    def _start_workers(self) -> None:
        totals, created = new_totals(self._settings.http_workers), int(time.time())
        for row in range(self._settings.http_workers):
            ours, theirs = socket.socketpair()
            channel: Channel[FromWorker] = Channel(ours, FromWorker)
            name = f"lowbit-http-{row}"
            try:
                with theirs:
                    process = start_process(run_worker, theirs, self._settings, row, name=name)
            except BaseException:
                channel.close()  # which ends one that has been started nevertheless
                raise
            worker = HttpProcess(process, channel)
            self._workers.append(worker)
            engine = SharedSocket.of(self._engines.current.others.pop())
            worker.channel.send(Start(engine, totals, created))

    def _accept(self) -> None:
        """Hand new connections to the processes that have the fewest, of those that answer."""
        for _ in range(MOST_ACCEPTED):
            able = [each for each in self._workers if self._is_able(each)]
            if not able:
                self._accept_later()
                return
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no more files, or memory
                log.error("no connection can be accepted: %s", error.strerror or error)
                self._accept_later()
                return
            worker = min(able, key=lambda each: (each.connections, each.given))
            worker.given += 1
            worker.connections += 1
            worker.channel.send(Connect(SharedSocket.of(connection)))

    def _is_able(self, worker: HttpProcess) -> bool:
        """True if a process may be handed a connection."""
        silent = worker.silent_beats >= SILENT_BEATS
        return not (worker.ended or silent) and worker.connections < self.room

    def _accept_later(self) -> None:
        """Let clients wait in the system's queue for some time."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening)
        self._retry = loop.call_later(RETRY_S, loop.add_reader, self._listening, self._accept)

    async def _hear(self, worker: HttpProcess) -> None:
        """Follow an HTTP process until it ends."""
        try:
            async for message in worker.channel.receive():
                self._obey(worker, message)
        except Exception:
            log.exception("a message of an HTTP process could not be followed")
        await self._ended(worker)

    def _obey(self, worker: HttpProcess, message: FromWorker) -> None:
        match message:
            case Ready():
                worker.ready.set()
            case Closed(count):
                worker.connections -= count
            case AskOthers(number):
                self._ask_others(worker, number)
            case DropOthers(number):
                self._pending.pop((worker, number), None)
            case CountsFound(counts):
                worker.asked, worker.silent_beats = False, 0
                self._note_counts(worker, [counts])
            case Lost():
                self.engine_ended = True
            case NotStarted():
                self._fail(message.error())

    def _ask_others(self, worker: HttpProcess, number: int) -> None:
        """Ask all other processes for their metrics."""
        others = {each for each in self._workers if not (each.ended or each is worker)}
        self._pending[worker, number] = PendingCounts(others)
        self._ask(others)
        self._answer_complete()

    def _ask(self, workers: Iterable[HttpProcess]) -> None:
        """Ask processes for their metrics, but none that still owes its last answer."""
        for each in workers:
            if not (each.asked or each.ended):
                each.asked = True
                each.channel.send(AskCounts())

    async def _beat(self) -> None:
        """Find out which processes answer; kill those that do not where the server ends."""
        while True:
            await asyncio.sleep(BEAT_S)
            self._draining_beats += self.draining
            for each in self._workers:
                each.silent_beats += each.asked
                # None of its clients is answered, and it would hold up the end for ever
                if min(each.silent_beats, self._draining_beats) >= HUNG_BEATS and not each.ended:
                    log.error("an HTTP process does not answer, and is killed")
                    each.process.kill()
            self._ask(each for each in self._workers if each.ready.is_set())

    def _note_counts(self, worker: HttpProcess, counts: list[Counts]) -> None:
        """Add the metrics of a process to those of the others; it has none if it has ended."""
        for pending in self._pending.values():
            if worker in pending.missing:
                pending.missing.remove(worker)
                pending.counts += counts
        self._answer_complete()

    def _answer_complete(self) -> None:
        """Answer each process that has asked for metrics and whose others have all said theirs."""
        complete = [key for key, pending in self._pending.items() if not pending.missing]
        for worker, number in complete:
            pending = self._pending.pop((worker, number))
            worker.channel.send(OthersFound(number, pending.counts))

    def _fail(self, error: LowbitError) -> None:
        """Let the server end because of an error, once all requests have ended."""
        if self.error is None:
            self.error = error
        self._drain()

    def _drain(self) -> None:
        if self.draining:  # a second Drain would end them at once
            return
        self.draining = True
        for each in self._workers:
            each.channel.send(Drain())

    async def _ended(self, worker: HttpProcess) -> None:
        """Note the end of a process, and why."""
        worker.ended = True
        worker.channel.close()
        await asyncio.to_thread(worker.process.join, STOP_S + END_S)
        if worker.process.exitcode is None:
            log.error("an HTTP process hangs, and is killed")
            worker.process.kill()
            await asyncio.to_thread(worker.process.join)
        if worker.process.exitcode or not self.draining:
            ending = ending_of(worker.process)
            if self.error is None:
                log.error("an HTTP process has ended: %s; the server ends, too", ending)
            hint = "the log above says why; a process that the system killed had too little memory"
            self._fail(ResourceError(f"an HTTP process has ended: {ending}", hint))
        worker.ready.set()
        for asker, number in [key for key in self._pending if key[0] is worker]:
            del self._pending[asker, number]
        self._note_counts(worker, [])

    def _at_signal(self) -> None:
        """Let all requests finish; the next signal ends all processes."""
        end_at_next_signal()
        self._drain()

    async def _watch_engine(self) -> None:
        """Wait for the end of the engine, and let another one follow if it may."""
        while True:
            await _end_of(self._engines.current.channel)
            if self.draining:
                return
            if await self._engines.follow() is None:
                log.error("the server ends, as the engine has")
                break
            for each in self._workers:
                each.channel.send(Follow(SharedSocket.of(self._engines.current.others.pop())))
        self._end()

    def _end(self) -> None:
        """End all processes: they have told their clients that the engine has ended."""
        self.draining = self.engine_ended = True
        for each in self._workers:
            each.channel.send(End())


async def _end_of(channel: Channel[FromEngine]) -> None:
    """Wait for the end of a channel."""
    try:
        async for _ in channel.receive():
            pass
    except Exception:
        log.exception("a message of the engine could not be read")
