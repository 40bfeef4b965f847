"""Closed and open loads on a server that moves the clock itself."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from lowbit.runtime.lab.http_load.answers import Answered, Failed
from lowbit.runtime.lab.http_load.clients import LoadRecord, OfferedLoad, run_load
from lowbit.runtime.lab.http_load.connection import address_of
from lowbit.runtime.lab.http_load.requests import RequestShape, arrivals
from lowbit.runtime.lab.http_load.server import LoadTarget
from tests.runtime.lab.http_load.conftest import Answer, Asking, Served, counting, serving

SHAPE = RequestShape("m", "completions", new_tokens=3, length=5)


def loaded(
    load: OfferedLoad, answer: Answer = counting, seed: int = 1
) -> tuple[LoadRecord, Served]:
    async def run() -> tuple[LoadRecord, Served]:
        async with serving(answer) as served:
            target = LoadTarget(address_of(served.url), SHAPE)
            return await run_load(target, load, Random(1), served.ticks.clock), served

    return asyncio.run(run())


async def timed(asking: Asking) -> None:
    """Text 2 s after the request, more 1 s and 4 s later; 6 tokens in all."""
    begun = asking.ticks.at
    await asking.begin()
    for after in (2.0, 3.0, 7.0):
        await asking.event({"choices": [{"text": "a"}]}, begun + after)
    await asking.end(begun + 8.0, prompt_tokens=5, completion_tokens=6)


def test_times_of_one_client() -> None:
    record, served = loaded(OfferedLoad(requests=3, warm_up=1, clients=1), timed)
    assert record.outcomes == tuple(
        Answered(8.0 * number, 2.0, 7.0, (1.0, 4.0), 6, 5, True) for number in (1, 2, 3)
    )
    assert (served.connections, len(served.asked)) == (1, 4)
    assert (record.most_at_once, record.held, record.most_late_s) == (1, 0, 0.0)


def test_clients_ask_together_each_on_its_connection() -> None:
    barrier = asyncio.Barrier(3)

    async def together(asking: Asking) -> None:
        await barrier.wait()
        await counting(asking)

    record, served = loaded(OfferedLoad(requests=6, warm_up=3, clients=3), together)
    assert (len(record.outcomes), record.most_at_once, served.connections) == (6, 3, 3)
    asked = [each.connection for each in served.asked]
    assert [asked.count(number) for number in (1, 2, 3)] == [3, 3, 3]
    assert len({body["prompt"] for body in served.bodies}) == 9


def test_progress_counts_requests_after_the_warm_up() -> None:
    seen: list[tuple[int, int]] = []

    async def run() -> None:
        async with serving() as served:
            target = LoadTarget(address_of(served.url), SHAPE)
            await run_load(
                target,
                OfferedLoad(requests=3, warm_up=2, clients=1),
                Random(1),
                served.ticks.clock,
                lambda done, total: seen.append((done, total)),
            )

    asyncio.run(run())
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_full_server_is_counted_and_given_the_time_that_it_asks_for() -> None:
    async def full(asking: Asking) -> None:
        if asking.ticks.at < 3:
            error = {"error": {"message": "the queue is full"}}
            await asking.json(error, "429 Too Many Requests", "Retry-After: 2\r\n")
        else:
            await counting(asking)

    record, served = loaded(OfferedLoad(requests=4, clients=1), full)
    failed, failed_again, *answered = record.outcomes
    assert failed == Failed(0.0, 0.0, "status 429", "status 429: the queue is full", 2.0)
    assert failed_again == Failed(2.0, 2.0, "status 429", "status 429: the queue is full", 2.0)
    assert [each.asked_s for each in answered] == [4.0, 4.0]
    assert served.connections == 1


def test_failures_end_no_load() -> None:
    """A stream that breaks, one that reports an error, one that is cut, and nonsense."""

    async def broken(asking: Asking) -> None:
        number = len(order)
        order.append(asking)
        if number == 0:
            await asking.begin()
            await asking.event({"choices": [{"text": "a"}]})
            asking.writer.close()
        elif number == 1:
            await asking.begin()
            await asking.event({"choices": [{"text": "a"}]})
            await asking.event({"error": {"message": "out of memory"}})
        elif number == 2:
            await asking.begin()
            await asking.event({"choices": [{"text": "a"}]})
            await asking.raw(b"0\r\n\r\n")
        elif number == 3:
            await asking.begin()
            await asking.chunk(b"data: }{\n\n")
        else:
            await counting(asking)

    order: list[Asking] = []
    record, _ = loaded(OfferedLoad(requests=5, clients=1), broken)
    assert [each.message for each in record.outcomes if isinstance(each, Failed)] == [
        "closed early: the server ended the connection",
        "error in the stream: out of memory",
        "closed early: the stream ended before the answer did",
        "no event of the API: }{",
    ]
    assert isinstance(record.outcomes[-1], Answered)


def test_server_that_has_gone() -> None:
    async def run() -> LoadRecord:
        async with serving() as served:
            target = LoadTarget(address_of(served.url), SHAPE)
        return await run_load(target, OfferedLoad(requests=2, clients=1), Random(1))

    record = asyncio.run(run())
    assert [type(each) for each in record.outcomes] == [Failed, Failed]
    assert {each.kind for each in record.outcomes if isinstance(each, Failed)} == {"cannot connect"}


def test_arrivals_wait_for_no_answer() -> None:
    """All are asked at their times, while none is answered."""
    times = arrivals(2.0, 5, Random(1))
    everybody = asyncio.Barrier(5)

    async def late(asking: Asking) -> None:
        await everybody.wait()
        await counting(asking)

    record, served = loaded(OfferedLoad(requests=4, warm_up=1, rate=2.0), late)
    asked = sorted(each.asked_s for each in record.outcomes)
    assert asked == pytest.approx(times[1:])
    assert (record.most_at_once, record.held, served.connections) == (5, 0, 5)
    assert record.most_late_s == pytest.approx(0.0, abs=1e-9)


def test_connections_are_used_again() -> None:
    """Each answer is whole before the next request arrives."""
    answered = asyncio.Event()
    answered.set()

    async def run() -> None:
        async with serving() as served:

            async def sleep(seconds: float) -> None:
                await answered.wait()
                answered.clear()
                await served.ticks.sleep(seconds)

            clock = replace(served.ticks.clock, sleep=sleep)
            target = LoadTarget(address_of(served.url), SHAPE)
            await run_load(
                target,
                OfferedLoad(4, rate=1.0),
                Random(1),
                clock,
                lambda done, total: answered.set(),
            )
            assert len(served.asked) == 4
            assert served.connections == 1

    asyncio.run(run())


def test_arrivals_beyond_the_limit_wait_and_are_timed_from_when_they_were_due() -> None:
    times = arrivals(2.0, 6, Random(1))
    two = asyncio.Barrier(2)

    async def pairs(asking: Asking) -> None:
        """Answer when all have arrived and two are under way."""
        while asking.ticks.at < times[-1]:
            await asyncio.sleep(0)
        await two.wait()
        asking.ticks.at = 100.0
        await counting(asking)

    record, _ = loaded(OfferedLoad(requests=6, rate=2.0, most_at_once=2), pairs)
    assert (record.most_at_once, record.held) == (2, 4)
    answered = [each for each in record.outcomes if isinstance(each, Answered)]
    assert sorted(each.asked_s for each in answered) == pytest.approx(times)
    assert {each.asked_s + each.first_s for each in answered} == {100.0}


def test_requests_of_the_warm_up_are_not_counted_among_those_that_waited() -> None:
    record, _ = loaded(OfferedLoad(requests=1, warm_up=3, rate=1e9, most_at_once=1))
    assert record.held == 1


def test_clock_of_this_machine() -> None:
    async def run() -> LoadRecord:
        async with serving() as served:
            target = LoadTarget(address_of(served.url), SHAPE)
            return await run_load(target, OfferedLoad(requests=4, clients=2), Random(1))

    record = asyncio.run(run())
    assert record.busy_share > 0
    for each in record.outcomes:
        assert isinstance(each, Answered)
        assert 0 < each.first_s <= each.whole_s


def test_titles() -> None:
    assert OfferedLoad(1, clients=1).title == "1 client"
    assert OfferedLoad(1, clients=8).title == "8 clients"
    assert OfferedLoad(1, rate=2.5).title == "2.5 requests/s"
