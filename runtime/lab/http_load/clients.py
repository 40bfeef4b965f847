"""Clients that put a load on a server: closed, each asking again and again, or open, by a rate."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from lowbit.runtime.lab.http_load.answers import AnswerTimer, Failed, Outcome, refusal
from lowbit.runtime.lab.http_load.connection import Connection
from lowbit.runtime.lab.http_load.framing import UnansweredError
from lowbit.runtime.lab.http_load.requests import MOST_AT_ONCE, PATHS, arrivals, request_body
from lowbit.runtime.lab.http_load.server import LoadTarget

Progress = Callable[[int, int], None]  # requests that have ended, of how many


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """A load: of so many clients, or of a rate."""

    requests: int  # that count
    warm_up: int = 0  # requests before them
    clients: int | None = None  # each asks one request after another; None with a rate
    rate: float | None = None  # mean arrivals a second of a Poisson process; None with clients
    most_at_once: int = MOST_AT_ONCE  # with a rate: requests under way; others wait

    @property
    def title(self) -> str:
        """See `load_title`."""
        return load_title(self.clients, self.rate)


def load_title(clients: int | None, rate: float | None) -> str:
    """`8 clients` or `2.5 requests/s`."""
    if rate is not None:
        return f"{rate:g} requests/s"
    return "1 client" if clients == 1 else f"{clients} clients"


@dataclass(frozen=True, slots=True)
class Clock:
    """Functions by which a load reads the time and waits."""

    now: Callable[[], float] = time.perf_counter  # seconds
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    busy: Callable[[], float] = time.process_time  # seconds of CPU time of this process


CLOCK = Clock()


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """Outcomes of a load, and how it went for the clients."""

    outcomes: tuple[Outcome, ...]  # of the requests that count
    most_at_once: int  # requests under way
    held: int  # with a rate: requests that waited because `most_at_once` were under way
    most_late_s: float  # with a rate: longest delay of an arrival, by this process itself
    busy_share: float  # of the time this process computed; near 1 it may have been the slower side


def nothing(done: int, total: int) -> None:
    """Show no progress."""


async def run_load(
    target: LoadTarget,
    load: OfferedLoad,
    random: Random,
    clock: Clock = CLOCK,
    on_progress: Progress = nothing,
) -> LoadRecord:
    """Ask all requests of a load, and wait for their ends."""
    run = _Run(target, load, random, clock, on_progress)
    begun, busy = clock.now(), clock.busy()
    try:
        await (run.closed(load.clients) if load.rate is None else run.open(load.rate))
    finally:
        run.close()
    took = clock.now() - begun
    return LoadRecord(
        outcomes=tuple(run.outcomes),
        most_at_once=run.most_at_once,
        held=run.held,
        most_late_s=run.most_late_s,
        busy_share=(clock.busy() - busy) / took if took else 0.0,
    )


class _Run:
    """A load under way."""

    def __init__(
        self,
        target: LoadTarget,
        load: OfferedLoad,
        random: Random,
        clock: Clock,
        on_progress: Progress,
    ) -> None:
        self.target, self.load, self.random = target, load, random
        self.clock, self.on_progress = clock, on_progress
        self.outcomes: list[Outcome] = []
        self.most_at_once = self.held = 0
        self.most_late_s = 0.0
        self._at_once = 0
        self._connections: list[Connection] = []
        self._idle: list[Connection] = []

    async def closed(self, clients: int | None) -> None:
        """Let each client ask one request after another."""
        numbers = iter(range(-self.load.warm_up, self.load.requests))

        async def client() -> None:
            connection = self._connect()
            for number in numbers:
                outcome = await self._ask(connection, number, self._request())
                if isinstance(outcome, Failed) and outcome.retry_after_s:
                    await self.clock.sleep(outcome.retry_after_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients or 1):
                group.create_task(client())

    async def open(self, rate: float) -> None:
        """Ask a request whenever one arrives, whatever is under way."""
        free = asyncio.Semaphore(self.load.most_at_once)
        count = self.load.warm_up + self.load.requests
        begun = self.clock.now()

        async def one(number: int, request: bytes, due_s: float) -> None:
            held = free.locked()
            self.held += held and number >= 0
            async with free:
                connection = self._idle.pop() if self._idle else self._connect()
                await self._ask(connection, number, request, due_s if held else None)
                self._idle.append(connection)

        async with asyncio.TaskGroup() as group:
            for number, after in enumerate(arrivals(rate, count, self.random), -self.load.warm_up):
                request, due_s = self._request(), begun + after
                await self.clock.sleep(max(due_s - self.clock.now(), 0.0))
                self.most_late_s = max(self.most_late_s, self.clock.now() - due_s)
                group.create_task(one(number, request, due_s))

    def close(self) -> None:
        """End all connections."""
        for connection in self._connections:
            connection.close()

    def _connect(self) -> Connection:
        connection = Connection(self.target.address, self.clock.now)
        self._connections.append(connection)
        return connection

    def _request(self) -> bytes:
        shape = self.target.shape
        return self.target.address.request(PATHS[shape.api], request_body(shape, self.random))

    async def _ask(
        self, connection: Connection, number: int, request: bytes, due_s: float | None = None
    ) -> Outcome:
        """Ask a request; numbers below 0 do not count.

        due_s: when it was due, if it had to wait; its times begin there.
        """
        timer = AnswerTimer()
        outcome: Outcome
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        asked_s = self.clock.now() if due_s is None else due_s
        try:
            response = await connection.ask(request, timer.take)
            if response.status != 200:
                raise refusal(response)
            outcome = timer.answered(asked_s)
        except UnansweredError as failure:
            outcome = Failed(
                asked_s, self.clock.now(), failure.kind, str(failure), failure.retry_after_s
            )
        finally:
            self._at_once -= 1
        if number >= 0:
            self.outcomes.append(outcome)
            self.on_progress(len(self.outcomes), self.load.requests)
        return outcome
