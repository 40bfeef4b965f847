"""An HTTP process, of several: it serves the connections that the supervisor hands to it."""

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lowbit.formats.errors import ResourceError
from lowbit.runtime.serve.app import build_app
from lowbit.runtime.serve.link.channel import Channel, SharedSocket
from lowbit.runtime.serve.link.messages import Facts, FromEngine
from lowbit.runtime.serve.link.process import begin_process, first_of, flush_logs, not_started
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
    Lost,
    OthersFound,
    Ready,
    Start,
    ToWorker,
)
from lowbit.runtime.serve.metrics import Counts
from lowbit.runtime.serve.served_model import load_prompts, served_model
from lowbit.runtime.serve.server import (
    Server,
    end_threads,
    tune_process,
)
from lowbit.runtime.serve.service import Service
from lowbit.runtime.serve.settings import ServeSettings
from lowbit.runtime.serve.siblings import AmongSiblings

log = logging.getLogger("lowbit.serve")


@dataclass(slots=True)
class Supervised:
    """An HTTP process's side of its supervisor; belongs to the event loop."""

    channel: Channel[ToWorker]
    _engines: asyncio.Queue[SharedSocket] = field(default_factory=asyncio.Queue)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _asked: dict[int, asyncio.Future[list[Counts]]] = field(default_factory=dict)

    def follow(self, engine: SharedSocket) -> None:
        """Let another engine follow one that has ended."""
        self._engines.put_nowait(engine)

    async def next_engine(self) -> Channel[FromEngine] | None:
        """The channel to the next engine, once the supervisor has loaded one.

        None for one that has ended already; the supervisor sees that, too.
        """
        try:
            channel, _ = await _engine_of(await self._engines.get())
        except ResourceError as error:
            log.error("no engine could be loaded: %s", error)
            return None
        return channel

    async def counts(self) -> list[Counts]:
        """Metrics of the other HTTP processes."""
        number = next(self._numbers)
        found: asyncio.Future[list[Counts]] = asyncio.get_running_loop().create_future()
        self._asked[number] = found
        self.channel.send(AskOthers(number))
        try:
            return await found
        except asyncio.CancelledError:
            self.channel.send(DropOthers(number))
            raise
        finally:
            del self._asked[number]

    def found(self, message: OthersFound) -> None:
        """Hand on metrics to whoever has asked for them."""
        asked = self._asked.get(message.number)
        if asked is not None and not asked.done():
            asked.set_result(message.counts)


class WorkerServer(Server):
    """Server without a listening socket and without signals: a supervisor has both."""

    def __init__(self, service: Service, supervised: Supervised) -> None:
        """Prepare to serve."""
        channel = supervised.channel
        super().__init__(build_app(service), service, lambda: channel.send(Ready()))
        self._supervised = supervised
        self._taken = self._closed = 0  # connections

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them to the supervisor."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve what the supervisor sends."""
        await super().startup([])
        self._listening = asyncio.create_task(self._listen())

    async def on_tick(self, counter: int) -> bool:
        """Report closed connections to the supervisor."""
        closed = self._taken - len(self.server_state.connections)
        if closed != self._closed:
            self._supervised.channel.send(Closed(closed - self._closed))
            self._closed = closed
        return await super().on_tick(counter)

    async def _listen(self) -> None:
        """Follow the supervisor; its end is that of the server."""
        try:
            async for message in self._supervised.channel.receive():
                await self._obey(message)
        except Exception:
            log.exception("a message of the supervisor could not be followed")
        finally:
            self.should_exit = True

    async def _obey(self, message: ToWorker) -> None:
        supervised = self._supervised
        match message:
            case Connect(connection):
                await self._serve_connection(connection.take())
            case Follow(engine):
                supervised.follow(engine)
            case Drain():
                self.drain()
            case End():
                self.should_exit = True
            case AskCounts():
                supervised.channel.send(CountsFound(self._service.metrics.counts))
            case OthersFound():
                supervised.found(message)

    async def _serve_connection(self, connection: socket.socket) -> None:
        config = self.config

        def protocol() -> asyncio.Protocol:  # as uvicorn makes one
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        self._taken += 1
        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:  # the client has left
            connection.close()


def run_worker(sock: socket.socket, settings: ServeSettings, row: int, follows: bool) -> None:
    """Serve connections until the supervisor says otherwise; the process's main function.

    Args:
        sock: channel to the supervisor.
        settings: of the server.
        row: number of this process among the HTTP processes.
        follows: it ends with the supervisor.
    """
    if not begin_process(follows):
        return
    channel: Channel[ToWorker] = Channel(sock, ToWorker)
    ended = False
    try:
        ended = _serve(channel, settings, row)
    finally:
        flush_logs()
    if not ended:
        os._exit(1)  # the interpreter would wait for the thread that hangs


def _serve(channel: Channel[ToWorker], settings: ServeSettings, row: int) -> bool:
    """Serve until the end; False if a thread hangs."""
    first = first_of(channel)  # apart, or mypy infers another type
    start = asyncio.run(first)
    if not isinstance(start, Start):  # the supervisor has ended
        return True
    try:
        engine, facts = asyncio.run(_engine_of(start.engine))
        model = served_model(facts, load_prompts(facts))
    except Exception as error:
        channel.send(not_started(error, "an HTTP process could not start"))
        return True
    tune_process()
    supervised = Supervised(channel)
    siblings = AmongSiblings(start.totals, row, supervised.counts)
    service = Service(
        model, settings, engine, supervised.next_engine, siblings, created=start.created
    )
    WorkerServer(service, supervised).run()
    if service.engine.lost:
        channel.send(Lost())
    return end_threads()


async def _engine_of(shared: SharedSocket) -> tuple[Channel[FromEngine], Facts]:
    """A channel to an engine that has loaded its model, and what that says of it.

    Raises:
        ResourceError: it has ended.
    """
    channel: Channel[FromEngine] = Channel(shared.take(), FromEngine)
    facts = await first_of(channel)
    if not isinstance(facts, Facts):
        raise ResourceError("the engine's process has ended", hint="the log above says why")
    return channel, facts
