"""The service that all endpoints share: the model, its engine, its threads and counts."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from lowbit.formats.errors import LowbitError
from lowbit.formats.text.job_queue import JobQueue
from lowbit.runtime.engine.request import Request
from lowbit.runtime.serve.answers import Answers, leaving
from lowbit.runtime.serve.errors import (
    ApiError,
    ClientLeftError,
    busy,
    of_lowbit,
    shutting_down,
    timed_out,
)
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.client import EngineClient
from lowbit.runtime.serve.link.messages import Constraints, FromEngine, Settings
from lowbit.runtime.serve.logs import Record
from lowbit.runtime.serve.metrics import Metrics
from lowbit.runtime.serve.request.fetch import ImageFetcher
from lowbit.runtime.serve.request.hosts import AllowedHosts
from lowbit.runtime.serve.request.places import Asker, Places
from lowbit.runtime.serve.served_model import ServedModel
from lowbit.runtime.serve.settings import ServeSettings
from lowbit.runtime.serve.siblings import Alone, Siblings

log = logging.getLogger("lowbit.serve")
THREADS = 4  # parse long bodies, prepare requests that are long or have schemas
IMAGE_THREADS = 2  # prepare requests with images; a large one takes seconds and a GB to decode
NEWCOMERS = 16  # requests beyond a full queue, of clients that have no other
UNWATCHED_S = 0.02  # from the beginning of some work, in which nobody asks if its client leaves
READING = 32  # requests whose bodies may be waited for, or read while the queue is full
Result = TypeVar("Result")


class PendingBodies:
    """Connections that wait for the next part of a body; the longest wait gives way to new ones.

    All methods belong to the event loop.

    Attributes:
        closed: nobody may wait any more.
    """

    def __init__(self, most: int) -> None:
        """Start without a connection."""
        self._most, self.closed = most, False
        self._waiting: dict[asyncio.Timeout, None] = {}  # the longest wait first

    def __len__(self) -> int:
        """Number of connections that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def wait(self, seconds: float) -> AsyncIterator[None]:
        """Wait for a part of a body inside the block.

        Raises:
            TimeoutError: time is up, or others came and this wait was the longest.
        """
        async with asyncio.timeout(seconds) as limit:
            self._waiting[limit] = None
            if len(self._waiting) > self._most:
                # Not yet: what has come already is taken without a wait.
                asyncio.get_running_loop().call_soon(self._shrink)
            try:
                yield
            finally:
                self._waiting.pop(limit, None)

    def close(self) -> None:
        """Let all that wait give way, and those that come later."""
        self._most, self.closed = 0, True
        self._shrink()

    def _shrink(self) -> None:
        while len(self._waiting) > self._most:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            if not longest.expired():
                longest.reschedule(0.0)  # in the past


async def _no_engine() -> None:
    """No engine follows one that has ended."""


@dataclass(slots=True)
class Service:
    """A model that is being served."""

    model: ServedModel
    settings: ServeSettings
    channel: Channel[FromEngine]  # to the engine
    # Waits for an engine that follows one that has ended; gives its channel, None where none does
    next_engine: Callable[[], Awaitable[Channel[FromEngine] | None]] = _no_engine
    siblings: Siblings = field(default_factory=Alone)
    metrics: Metrics = field(default_factory=Metrics)
    # Time at which the server was started, seconds since 1970
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # running requests may end, new ones are refused
    active: int = 0  # number of requests that have not been answered
    clients: Counter[str] = field(default_factory=Counter)  # the same by client
    _engine: EngineClient | None = None
    _reviving: asyncio.Task[None] | None = None
    # Threads for work that would hold up the event loop
    executor: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="lowbit-text")
    )
    places: Places = field(default_factory=lambda: Places(THREADS, THREADS, THREADS))
    # Threads of their own for images, so that no request of text waits for one
    image_executor: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(
            IMAGE_THREADS, thread_name_prefix="lowbit-images"
        )
    )
    image_places: Places = field(
        default_factory=lambda: Places(IMAGE_THREADS, IMAGE_THREADS, IMAGE_THREADS)
    )
    _templates: JobQueue | None = None
    fetcher: ImageFetcher = field(init=False)  # of images that clients name by their address
    # Requests whose bodies have not come
    pending: PendingBodies = field(default_factory=lambda: PendingBodies(READING))

    def __post_init__(self) -> None:
        """Fetch images from the hosts of the settings alone."""
        self.fetcher = ImageFetcher(AllowedHosts(self.settings.image_hosts))

    @property
    def engine(self) -> EngineClient:
        """The engine, in its own process."""
        if self._engine is None:
            raise RuntimeError("the server has not been started")
        return self._engine

    @property
    def templates(self) -> JobQueue:
        """The process that renders the chat template."""
        if self._templates is None:
            raise RuntimeError("the server has not been started")
        return self._templates

    def revive(self) -> bool:
        """Let another engine follow one that has ended; False once it is known that none does."""
        if self._reviving is None:
            self._reviving = asyncio.create_task(self._revive())
        return not self._reviving.done()

    async def _revive(self) -> None:
        await self.engine.stop()
        channel = await self.next_engine()
        if channel is None:
            return
        self.channel = channel
        self.start()
        self._reviving = None

    def start(self) -> None:
        """Begin to listen to the engine, on the event loop."""
        self._engine = EngineClient(
            self.channel, self.model.tokenizer, self.metrics, self.siblings.set_open
        )
        share = self.settings.client_share(self.model.sequences)
        self._engine.start(Settings(share, self.settings.grammar_bytes))
        if self._templates is None:
            self._templates = JobQueue()
            if self.model.template is not None:
                self._templates.prepare(self.model.template.preparation)

    async def stop(self) -> None:
        """Let go of the engine, and end the threads."""
        await self.engine.stop()
        self.templates.close()
        for executor in (self.executor, self.image_executor):
            executor.shutdown(wait=False, cancel_futures=True)

    @property
    def failing(self) -> bool:
        """True if no answers can be generated: the engine has ended, or a step hangs."""
        return not self.engine.alive or self.engine.stalled

    @property
    def name(self) -> str:
        """Name of the model in answers."""
        return self.settings.names[0]

    def has_name(self, name: str) -> bool:
        """True if requests may call the model so."""
        return self.settings.any_name or name in self.settings.names

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            ApiError: 404.
        """
        if name is not None and not self.has_name(name):
            raise ApiError(
                404,
                f"the model `{name}` does not exist; this server has `{self.name}`",
                param="model",
                code="model_not_found",
            )

    async def in_thread(self, http: HttpRequest, work: Callable[[], Result]) -> Result:
        """Run work in a thread, as it would hold up the event loop; clients take turns.

        Raises:
            ApiError: for a LowbitError; or the time is over.
            ClientLeftError: the client left meanwhile; what has not begun never does.
        """
        return await self._in_place(http, self.places, self.executor, work)

    async def in_image_thread(self, http: HttpRequest, work: Callable[[], Result]) -> Result:
        """Run work that decodes images in a thread; turns and errors as in `in_thread`."""
        return await self._in_place(http, self.image_places, self.image_executor, work)

    async def _in_place(
        self,
        http: HttpRequest,
        places: Places,
        executor: ThreadPoolExecutor,
        work: Callable[[], Result],
    ) -> Result:
        """Run work once one of the places, as many as there are threads, is free for it."""
        asker, loop = Asker(record_of(http).client), asyncio.get_running_loop()
        ended: asyncio.Future[Result] = loop.create_future()

        def end(done: Future[Result]) -> None:
            places.give_back(asker)  # whoever still waits for the thread
            if not ended.done():
                _hand_over(done, ended)

        def wake(done: Future[Result]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, done)

        def begin() -> None:
            executor.submit(work).add_done_callback(wake)

        async def result() -> Result:
            await places.take(asker)
            begin()
            return await ended

        at_once = places.take_free(asker)
        if at_once:
            begin()
        try:
            return await self.unless_left(http, ended if at_once else result())
        except LowbitError as error:
            raise of_lowbit(error) from None

    async def unless_left(self, http: HttpRequest, work: Awaitable[Result]) -> Result:
        """The result of `work`, which is cancelled when the client leaves or its time is over.

        Raises:
            ClientLeftError: the client left.
            ApiError: 504.
        """
        limit = self.settings.request_timeout_s
        end = record_of(http).started + limit
        task = asyncio.ensure_future(work)
        watch: asyncio.Task[None] | None = None
        try:
            await asyncio.wait((task,), timeout=min(UNWATCHED_S, end - time.perf_counter()))
            if not task.done():
                watch = asyncio.create_task(leaving(http))
                left_s = end - time.perf_counter()
                both = (task, watch)
                await asyncio.wait(both, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientLeftError if watch is not None and watch.done() else timed_out(limit)
        finally:
            task.cancel()
            if watch is not None:
                watch.cancel()

    def begin(
        self, http: HttpRequest, requests: Sequence[Request], constraints: Constraints
    ) -> Answers:
        """Ask the engine for answers.

        Args:
            http: when its client leaves, the answers are cancelled.
            requests: checked request to the engine for each answer.
            constraints: what restricts each of them.

        Raises:
            ApiError: 429 where the queue is full, 503 while the server ends or the engine is gone.
        """
        record, logs, prompts = record_of(http), self.settings.log_prompts, list[str]()
        if logs:  # before other processes wait
            each_once = dict.fromkeys(each.prompt for each in requests)
            prompts = [self.model.tokenizer.text.decode(ids) for ids in each_once]
        with self.siblings.locked():
            self.check_open(len(requests), record.client)
            record.prompts = prompts
            answers = Answers(http, record, self.settings.request_timeout_s, logs)
            self.engine.begin(answers, requests, constraints)
            return answers

    def check_open(self, answers: int, client: str) -> None:
        """Refuse new answers where the server cannot generate them; errors as in `begin`.

        Args:
            client: who asks; the queue that others fill is not full for one that has nothing in it.
        """
        if self.draining:
            raise shutting_down()
        if self.failing:
            message = "the engine does not answer; the server's log says why"
            raise ApiError(503, message, "server_error", headers={"Retry-After": "60"})
        rows, running = self.model.sequences, self.engine.open + self.siblings.open_elsewhere
        waiting = running + answers - rows
        if waiting > self.settings.queue + self._more_for(client) and running:
            raise busy(self._retry_after(waiting))
        if answers > rows + self.settings.queue:
            raise ApiError(
                400,
                f"the request asks for {answers} answers, this server makes at most "
                f"{rows + self.settings.queue}",
            )

    def drain(self) -> None:
        """Refuse new requests; one whose body has not come whole is a new one."""
        self.draining = True
        self.pending.close()

    def enter(self, client: str) -> None:
        """Count a request that is to be answered."""
        self.active += 1
        self.clients[client] += 1
        self.siblings.add(client, 1)

    def leave(self, client: str) -> None:
        """Count a request that has been answered."""
        self.active -= 1
        self.clients[client] -= 1
        if not self.clients[client]:
            del self.clients[client]
        self.siblings.add(client, -1)

    async def all_metrics(self) -> Metrics:
        """Metrics of all processes that speak HTTP."""
        found = Metrics()
        for each in (self.metrics.counts, *await self.siblings.counts()):
            found.add(each)
        return found

    def check_pending(self, client: str) -> None:
        """Refuse a request before its body is read where too many are not answered.

        Those whose bodies have not come do not count: they give way, see `PendingBodies`. The limit
        is that of a process, as its memory is what it protects.

        Raises:
            ApiError: 429.
        """
        if self.active - len(
            self.pending
        ) > self.model.sequences + self.settings.queue + READING + self._more_for(client):
            raise busy(1)

    def _more_for(self, client: str) -> int:
        """Places behind the queue for a client whose only request this is."""
        asked = self.clients[client] + self.siblings.asked_elsewhere(client)
        return NEWCOMERS if asked <= 1 else 0

    def _retry_after(self, waiting: int) -> int:
        """Seconds until there may be room: the mean time of answers so far, for all that wait."""
        whole = self.metrics.whole
        each = whole.total / whole.count if whole.count else 1.0
        return max(1, min(60, round(each * waiting / self.model.sequences)))


def service_of(http: HttpRequest) -> Service:
    """The service of the application that got a request."""
    service: Service = http.app.state.service
    return service


def record_of(http: HttpRequest) -> Record:
    """The record of a request, made by `app.Outermost`."""
    record: Record = http.scope["lowbit.record"]
    return record


def _hand_over(done: Future[Result], ended: asyncio.Future[Result]) -> None:
    """Give the end of some work in a thread to the event loop's future for it."""
    if done.cancelled():  # the server ends
        ended.cancel()
    elif (error := done.exception()) is not None:
        ended.set_exception(error)
    else:
        ended.set_result(done.result())
