"""Connections, metrics and failures between HTTP processes, which are none here."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lowbit.formats.errors import CheckpointError, ResourceError
from lowbit.runtime.images.shared import SharedBytes
from lowbit.runtime.serve import http_worker
from lowbit.runtime.serve import supervisor as module
from lowbit.runtime.serve.link import engines as engines_module
from lowbit.runtime.serve.link.channel import Channel, SharedSocket
from lowbit.runtime.serve.link.engines import Engines
from lowbit.runtime.serve.link.messages import FromEngine, NotStarted, problem_of
from lowbit.runtime.serve.link.process import EngineProcess, first_of
from lowbit.runtime.serve.link.workers import (
    AskCounts,
    AskOthers,
    Closed,
    Connect,
    CountsFound,
    Drain,
    DropOthers,
    End,
    FromWorker,
    Lost,
    OthersFound,
    Ready,
    Start,
    ToWorker,
)
from lowbit.runtime.serve.server import listen
from lowbit.runtime.serve.settings import ServeSettings
from lowbit.runtime.serve.siblings import new_totals
from lowbit.runtime.serve.supervisor import Supervisor
from tests.runtime.serve.conftest import counts_of


@dataclass(eq=False)
class Fake:
    """An HTTP process as its supervisor sees it."""

    channel: Channel[ToWorker]
    exitcode: int | None = None
    heard: asyncio.Queue[ToWorker] = field(default_factory=asyncio.Queue)
    kinds: Counter[type] = field(default_factory=Counter)  # of all messages
    connections: list[socket.socket] = field(default_factory=list)

    def join(self, _: float | None = None) -> None:
        pass

    def kill(self) -> None:
        if self.exitcode is None:
            self.end(-9)

    def end(self, code: int) -> None:
        self.exitcode = code
        self.channel.close()

    async def hear(self) -> None:
        async for message in self.channel.receive():
            if isinstance(message, Connect):
                self.connections.append(message.connection.take())
            self.heard.put_nowait(message)
            self.kinds[type(message)] += 1

    async def next(self, kind: type) -> Any:
        while True:
            message = await asyncio.wait_for(self.heard.get(), 20)
            if isinstance(message, kind):
                return message


@dataclass
class Stage:
    """A supervisor, its processes, and where clients connect."""

    supervisor: Supervisor
    workers: list[Fake]
    port: int
    engine: socket.socket
    serving: asyncio.Task[None]
    begun: asyncio.Event  # clients may come
    clients: list[socket.socket] = field(default_factory=list)

    def connect(self) -> socket.socket:
        self.clients.append(socket.create_connection(("127.0.0.1", self.port)))
        return self.clients[-1]

    async def end_engine(self) -> None:
        """End the engine; all processes are told to end, and do."""
        self.engine.close()
        for each in self.workers:
            await each.next(End)
            each.end(0)
        await asyncio.wait_for(self.serving, 20)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0)


@asynccontextmanager
async def staged(
    patch: pytest.MonkeyPatch,
    count: int = 2,
    *,
    ready: bool = True,
    most: int = 8,
    next_engine: Callable[[], EngineProcess] | None = None,
    beat_s: float = 1e6,
) -> AsyncIterator[Stage]:
    """A supervisor of `count` processes, of which `most` can be started."""
    workers: list[Fake] = []

    def start_process(_: object, sock: socket.socket, *__: object, name: str) -> Fake:
        if len(workers) == most:
            raise OSError("no process is left")
        workers.append(Fake(Channel[ToWorker](sock.dup(), ToWorker)))
        return workers[-1]

    patch.setattr(module, "start_process", start_process)
    patch.setattr(module, "BEAT_S", beat_s)
    pairs = [socket.socketpair() for _ in range(1 + count)]
    ours = [each for each, _ in pairs]
    process: Any = SimpleNamespace(join=bool, exitcode=0)
    engine = EngineProcess(process, Channel[FromEngine](ours[0], FromEngine), ours[1:])
    restarts = next_engine is not None
    settings = ServeSettings(("none",), http_workers=count)
    begun = asyncio.Event()
    with listen("127.0.0.1", 0) as taken:
        engines = Engines(engine, next_engine or (lambda: engine), restarts)
        supervisor = Supervisor(settings, taken, engines)
        serving = asyncio.create_task(supervisor.serve(begun.set))
        await asyncio.sleep(0)
        hearing = [asyncio.create_task(each.hear()) for each in workers]
        stage = Stage(supervisor, workers, taken.getsockname()[1], pairs[0][1], serving, begun)
        if ready:
            for each in workers:
                each.channel.send(Ready())
            await asyncio.wait_for(begun.wait(), 20)
        try:
            yield stage
        finally:
            for task in (serving, *hearing):  # nothing wakes one whose channel closed as it read
                task.cancel()
            await asyncio.wait([serving, *hearing], timeout=20)
            for each in workers:
                each.channel.close()
                for connection in each.connections:
                    connection.close()
            for sock in [*stage.clients, *engine.others, *(theirs for _, theirs in pairs)]:
                sock.close()
            engine.channel.close()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def test_connections_go_to_the_process_that_has_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with staged(monkeypatch) as stage:
            first, second = stage.workers
            for _ in range(64):
                stage.connect()
            await stage.until(lambda: len(first.connections) + len(second.connections) == 64)
            assert len(first.connections) == 32
            second.channel.send(Closed(3))
            await stage.until(lambda: stage.supervisor._workers[1].connections == 29)
            for _ in range(3):
                stage.connect()
            await stage.until(lambda: len(second.connections) == 35)
            asked = stage.connect()
            asked.sendall(b"a request")
            await stage.until(lambda: len(first.connections) == 33)
            first.connections[-1].setblocking(True)
            assert first.connections[-1].recv(100) == b"a request"

    run(work)


def test_a_process_that_does_not_answer_gets_no_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until it does; where none does, clients wait."""

    async def answer(worker: Fake) -> None:
        while True:
            worker.channel.send(CountsFound(counts_of(1)))
            # Before Python 3.12 `wait_for`, which `next` is made of, may forget to be cancelled.
            while not isinstance(await worker.heard.get(), AskCounts):
                pass

    async def work() -> None:
        monkeypatch.setattr(module, "RETRY_S", 0.01)
        async with staged(monkeypatch, beat_s=0.01) as stage:
            stopped, other = stage.workers
            for each in stage.workers:
                await each.next(AskCounts)
            supervised = stage.supervisor._workers
            await stage.until(
                lambda: min(each.silent_beats for each in supervised) >= module.SILENT_BEATS
            )
            for _ in range(4):
                stage.connect()
            await stage.until(lambda: stage.supervisor._retry is not None)
            assert [stopped.connections, other.connections] == [[], []]
            answering = [asyncio.create_task(answer(other))]
            await stage.until(lambda: len(other.connections) == 4)
            assert not stopped.connections
            assert stopped.kinds[AskCounts] == 1
            answering.append(asyncio.create_task(answer(stopped)))

            def has_one() -> bool:
                stage.connect()
                return bool(stopped.connections)

            await stage.until(has_one)
            assert len(answering) == 2  # are held, and cancelled at the end of the loop

    run(work)


def test_no_process_gets_more_connections_than_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that has no room for a file that it is sent loses its channel."""

    async def work() -> None:
        monkeypatch.setattr(module, "most_files", lambda: 4)
        monkeypatch.setattr(module, "RETRY_S", 0.01)
        async with staged(monkeypatch) as stage:
            first, second = stage.workers
            for _ in range(8):
                stage.connect()
            await stage.until(lambda: stage.supervisor._retry is not None)
            await stage.until(lambda: [len(each.connections) for each in stage.workers] == [3, 3])
            first.channel.send(Closed(2))
            await stage.until(lambda: len(first.connections) == 5)
            assert len(second.connections) == 3

    run(work)


def test_metrics_are_asked_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of them ends meanwhile."""

    async def work() -> None:
        async with staged(monkeypatch, 3) as stage:
            first, second, third = stage.workers
            first.channel.send(AskOthers(7))
            for each, tokens in ((second, 10), (third, 100)):
                await each.next(AskCounts)
                each.channel.send(CountsFound(counts_of(tokens)))
                await stage.until(lambda: pending_of(stage) in ([1], []))
            found = await first.next(OthersFound)
            assert found.number == 7
            assert found.counts == [counts_of(10), counts_of(100)]
            first.channel.send(AskOthers(8))
            await second.next(AskCounts)
            second.channel.send(CountsFound(counts_of(1)))
            await third.next(AskCounts)
            third.end(-9)
            found = await first.next(OthersFound)
            assert (found.number, found.counts) == (8, [counts_of(1)])

    run(work)


def pending_of(stage: Stage) -> list[int]:
    """Processes that each question for metrics waits for."""
    return [len(each.missing) for each in stage.supervisor._pending.values()]


def test_nothing_is_kept_of_questions_to_a_process_that_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with staged(monkeypatch, 3) as stage:
            first, second, silent = stage.workers
            for number in range(100):
                first.channel.send(AskOthers(number))
                await second.next(AskCounts)
                second.channel.send(CountsFound(counts_of(1)))
                await stage.until(lambda: pending_of(stage) == [1])
                first.channel.send(DropOthers(number))
                await stage.until(lambda: not pending_of(stage))
            assert silent.kinds[AskCounts] == 1
            first.channel.send(AskOthers(100))
            await second.next(AskCounts)
            second.channel.send(CountsFound(counts_of(2)))
            await stage.until(lambda: pending_of(stage) == [1])
            silent.channel.send(CountsFound(counts_of(3)))  # to the first question
            found = await first.next(OthersFound)
            assert (found.number, found.counts) == (100, [counts_of(2), counts_of(3)])
            first.channel.send(AskOthers(101))
            await stage.until(lambda: silent.kinds[AskCounts] == 2)
            first.end(-9)  # who has asked, as well
            await stage.until(lambda: not pending_of(stage))

    run(work)


def test_a_process_that_waits_no_more_for_metrics_says_so() -> None:
    async def work() -> None:
        ours, theirs = socket.socketpair()
        channel, worker = Channel[FromWorker](ours, FromWorker), Channel[ToWorker](theirs, ToWorker)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await http_worker.Supervised(worker).counts()
        heard = channel.receive()
        assert await anext(heard) == AskOthers(1)
        assert await anext(heard) == DropOthers(1)
        await heard.aclose()
        worker.close()
        channel.close()

    run(work)


def test_a_process_that_cannot_start_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with staged(monkeypatch, ready=False) as stage:
            first, second = stage.workers
            assert isinstance((await first.next(Start)).totals, SharedBytes)
            problem = problem_of(CheckpointError("a template that ends nowhere"))
            first.channel.send(NotStarted(problem, "in worker"))
            await second.next(Drain)
            for each in stage.workers:
                each.end(0)
            await asyncio.wait_for(stage.serving, 20)
            error = stage.supervisor.error
            assert isinstance(error, CheckpointError)
            assert error.__notes__ == ["in worker"]

    run(work)


def test_a_bug_at_the_start_of_a_process_is_logged_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(http_worker, "_engine_of", broken)
    ours, theirs = socket.socketpair()
    engine, its_end = socket.socketpair()
    channel = Channel[FromWorker](ours, FromWorker)
    channel.send(Start(SharedSocket.of(engine), new_totals(1), 0))
    worker = Channel[ToWorker](theirs, ToWorker)
    assert http_worker._serve(worker, ServeSettings(("none",)), 0)
    worker.close()
    first = first_of(channel)
    told = asyncio.run(first)
    channel.close()
    its_end.close()
    assert isinstance(told, NotStarted)
    assert told.problem.message == "an HTTP process could not start: ZeroDivisionError"
    assert "in broken\n" in told.trace
    assert "ZeroDivisionError" in caplog.text


def test_a_start_that_fails_half_way_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with staged(monkeypatch, ready=False, most=1) as stage:
            with pytest.raises(OSError, match="no process"):
                await asyncio.wait_for(stage.serving, 20)
            assert [each.exitcode for each in stage.workers] == [-9]

    run(work)


def test_no_process_stays_where_a_signal_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with staged(monkeypatch, ready=False) as stage:
            await stage.workers[1].next(Start)
            stage.serving.cancel()
            await asyncio.wait([stage.serving], timeout=20)
            assert [each.exitcode for each in stage.workers] == [-9, -9]

    run(work)


def test_an_engine_that_cannot_be_loaded_again_ends_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def next_engine() -> EngineProcess:
        raise ResourceError("the GPU has no memory left")

    async def work() -> None:
        async with staged(monkeypatch, next_engine=next_engine) as stage:
            await stage.end_engine()
            assert stage.supervisor.engine_ended
            assert "no engine could be loaded: the GPU has no memory left" in caplog.text

    monkeypatch.setattr(engines_module, "SHORT_LIFE_S", 0.0)
    run(work)


def test_a_process_that_ends_lets_the_others_finish_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another word of it would end them at once."""

    async def work() -> None:
        async with staged(monkeypatch, 3) as stage:
            first, second, third = stage.workers
            first.end(-11)
            await second.next(Drain)
            second.end(-9)
            await stage.until(lambda: stage.supervisor._workers[1].ended)
            stage.connect()  # those that come meanwhile are told that the server ends
            await third.next(Connect)
            third.end(0)
            await asyncio.wait_for(stage.serving, 20)
            assert third.kinds[Drain] == 1
            assert caplog.text.count("has ended") == 1
            assert str(stage.supervisor.error) == "an HTTP process has ended: signal SIGSEGV"
            assert not stage.supervisor.engine_ended

    run(work)


def test_the_end_of_the_engine_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with staged(monkeypatch) as stage:
            await stage.end_engine()
            assert stage.supervisor.engine_ended
            assert stage.supervisor.error is None

    run(work)


@pytest.mark.parametrize("loses", [True, False])
def test_an_engine_that_ends_behind_a_signal_is_missed_where_answers_are_lost(
    loses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with staged(monkeypatch) as stage:
            first, second = stage.workers
            stage.supervisor._drain()
            stage.engine.close()
            second.end(0)
            if loses:
                first.channel.send(Lost())
            first.end(0)
            await asyncio.wait_for(stage.serving, 20)
            assert stage.supervisor.engine_ended is loses

    run(work)


@pytest.mark.parametrize("engine_ends", [True, False])
def test_a_process_that_does_not_answer_does_not_hold_up_the_end(
    engine_ends: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with staged(monkeypatch, beat_s=0.001) as stage:
            stopped, other = stage.workers
            await stage.until(lambda: stage.supervisor._workers[0].silent_beats > module.HUNG_BEATS)
            if engine_ends:
                stage.engine.close()
            else:
                stage.supervisor._drain()
            await stage.until(lambda: stage.supervisor.draining)
            assert stage.supervisor._draining_beats < module.HUNG_BEATS
            assert stopped.exitcode is None
            other.end(0)
            await asyncio.wait_for(stage.serving, 20)
            assert stopped.exitcode == -9
            assert str(stage.supervisor.error) == "an HTTP process has ended: signal SIGKILL"

    run(work)
    assert caplog.text.count("does not answer, and is killed") == 1


def test_no_client_is_invited_where_the_engine_ends_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with staged(monkeypatch, ready=False) as stage:
            stage.engine.close()
            for each in stage.workers:
                await each.next(End)
                each.channel.send(Ready())
                each.end(0)
            await asyncio.wait_for(stage.serving, 20)
            assert stage.supervisor.engine_ended
            assert not stage.begun.is_set()

    run(work)
