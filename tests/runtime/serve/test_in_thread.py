"""Work of requests in threads: turns, clients that leave, and what is spent on short work."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from lowbit.formats.errors import RequestError
from lowbit.runtime.serve import service as module
from lowbit.runtime.serve.errors import ApiError, ClientLeftError
from lowbit.runtime.serve.logs import Record
from lowbit.runtime.serve.service import THREADS, Service
from lowbit.runtime.serve.settings import ServeSettings


class Request:
    """A request whose client may leave; counts how often it is asked for that."""

    def __init__(self) -> None:
        self.scope, self.asked = {"lowbit.record": Record("client")}, 0
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        self.asked += 1
        await self.left.wait()
        return {"type": "http.disconnect"}


@pytest.fixture
def ending() -> threading.Event:
    """Lets the threads of a test end, at its own end at the latest."""
    return threading.Event()


@pytest.fixture
def service(ending: threading.Event) -> Iterator[Service]:
    made: Any = Service(SimpleNamespace(), ServeSettings(("m",)), SimpleNamespace())  # type: ignore[arg-type]
    yield made
    ending.set()  # a test that fails would wait for ever
    made.executor.shutdown(cancel_futures=True)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


async def turn() -> None:
    for _ in range(9):
        await asyncio.sleep(0)


def test_short_work_has_no_watcher_and_no_task(
    service: Service, ending: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNWATCHED_S", 60.0)

    async def test() -> None:
        request = Request()
        asked: Any = service.in_thread(request, ending.wait)  # type: ignore[arg-type]
        task = asyncio.create_task(asked)
        await turn()
        assert asyncio.all_tasks() == {asyncio.current_task(), task}
        ending.set()
        assert await task is True
        assert request.asked == 0

    run(test)


def test_who_leaves_waits_for_no_thread_and_holds_its_place_until_the_end(
    service: Service, ending: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNWATCHED_S", 0.0)

    async def test() -> None:
        begun = list[int]()

        def work(number: int) -> bool:
            begun.append(number)
            return ending.wait()

        requests = [Request() for _ in range(THREADS + 2)]
        tasks = [
            asyncio.create_task(service.in_thread(each, lambda n=n: work(n)))  # type: ignore[arg-type, misc]
            for n, each in enumerate(requests)
        ]
        while not all(each.asked for each in requests):
            await asyncio.sleep(0)
        for left in (requests[0], requests[THREADS]):  # one that runs, one that waits
            left.left.set()
        for number in (0, THREADS):
            with pytest.raises(ClientLeftError):
                await tasks[number]
        assert service.places._taken == THREADS
        ending.set()
        rest = [each for n, each in enumerate(tasks) if n not in (0, THREADS)]
        assert await asyncio.gather(*rest) == [True] * THREADS
        await turn()
        assert sorted(begun) == [*range(THREADS), THREADS + 1]
        while service.places._taken:
            await asyncio.sleep(0)

    run(test)


def test_errors_of_a_thread_are_those_of_the_request(service: Service) -> None:
    def fail(error: BaseException) -> None:
        raise error

    async def test() -> None:
        for error, expected in (
            (RequestError("too much"), ApiError),
            (ZeroDivisionError(), ZeroDivisionError),
        ):
            with pytest.raises(expected):
                await service.in_thread(Request(), lambda error=error: fail(error))  # type: ignore[arg-type, misc]

    run(test)


def test_work_that_the_end_of_the_server_cancels(service: Service, ending: threading.Event) -> None:
    async def test() -> None:
        blocking = [service.executor.submit(ending.wait) for _ in range(THREADS)]
        task = asyncio.create_task(service.in_thread(Request(), lambda: 1))  # type: ignore[arg-type]
        await turn()
        service.executor.shutdown(wait=False, cancel_futures=True)
        with pytest.raises((asyncio.CancelledError, CancelledError)):
            await task
        ending.set()
        assert all(each.result() for each in blocking)

    run(test)


def test_time_that_is_over_is_no_client_that_left(
    service: Service, ending: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNWATCHED_S", 0.0)

    async def test() -> None:
        request = Request()
        request.scope["lowbit.record"].started -= service.settings.request_timeout_s
        with pytest.raises(ApiError) as caught:
            await service.in_thread(request, ending.wait)  # type: ignore[arg-type]
        assert caught.value.status == 504

    run(test)
