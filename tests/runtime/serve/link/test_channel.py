"""Messages arrive whole and in order, whatever the socket takes at once."""

import asyncio
import socket
import threading
from typing import Any

from lowbit.runtime.serve.link.channel import LENGTH, READ, Channel


def pair(received: Any = list[int]) -> tuple[Channel[Any], Channel[Any]]:
    ours, theirs = socket.socketpair()
    return Channel(ours, received), Channel(theirs, received)


async def taken(channel: Channel[Any], count: int) -> list[Any]:
    found: list[Any] = []
    async for message in channel.receive():
        found.append(message)
        if len(found) == count:
            break
    return found


def test_messages_wait_for_a_reader_in_order() -> None:
    here, there = pair()
    sent = [[number] * (1 + number % 7 * 20_000) for number in range(60)]

    async def run() -> list[Any]:
        first = asyncio.create_task(taken(here, 1))  # a loop that writes what waits
        await asyncio.sleep(0)
        for message in sent:
            here.send(message)
        found = await taken(there, len(sent))
        there.send([1])
        await first
        return found

    assert asyncio.run(run()) == sent
    assert not here._waiting
    here.close()
    there.close()


def test_what_is_sent_before_a_loop_runs_is_not_lost() -> None:
    here, there = pair()
    here.send(list(range(300_000)))
    assert here._waiting

    async def run() -> list[Any]:
        writing = asyncio.create_task(taken(here, 1))
        [found] = await taken(there, 1)
        there.send([])
        await writing
        return list(found)

    assert asyncio.run(run()) == list(range(300_000))
    here.close()
    there.close()


def test_threads_do_not_mix_their_messages() -> None:
    here, there = pair()

    def send(number: int) -> None:
        for _ in range(200):
            here.send([number] * 999)

    async def run() -> list[Any]:
        listening = asyncio.create_task(taken(here, 1))
        await asyncio.sleep(0)
        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        found = await taken(there, 800)
        for thread in threads:
            thread.join()
        there.send([])
        await listening
        return found

    found = asyncio.run(run())
    assert {len(message) for message in found} == {999}
    assert all(len(set(message)) == 1 for message in found)
    assert sorted(message[0] for message in found) == sorted([0, 1, 2, 3] * 200)
    here.close()
    there.close()


def test_one_that_follows_the_first_is_kept_for_the_next_loop() -> None:
    here, there = pair()
    for number in range(3):
        here.send([number])
    assert asyncio.run(taken(there, 1)) == [[0]]
    here.close()

    async def rest() -> list[Any]:
        return [message async for message in there.receive()]

    assert asyncio.run(rest()) == [[1], [2]]
    there.close()


def test_a_peer_that_ends_ends_what_comes_and_takes_no_harm() -> None:
    here, there = pair()
    there.close()
    here.send([1])
    here.send(list(range(READ)))

    async def all_of() -> list[Any]:
        return [message async for message in here.receive()]

    assert asyncio.run(all_of()) == []
    here.close()
    here.send([2])  # nobody hears it


def test_a_cut_message_is_not_taken_for_one() -> None:
    ours, theirs = socket.socketpair()
    here: Channel[Any] = Channel(ours, list[int])
    theirs.send((100).to_bytes(LENGTH, "little") + b"\x91")
    theirs.close()

    async def all_of() -> list[Any]:
        return [message async for message in here.receive()]

    assert asyncio.run(all_of()) == []
    here.close()


def test_what_waits_is_sent_before_the_end() -> None:
    here, there = pair()
    here.send(list(range(300_000)))
    assert here._waiting

    async def run() -> list[Any]:
        reading = asyncio.create_task(taken(there, 1))
        await here.flush(30)
        here.close()
        [found] = await reading
        return list(found)

    assert asyncio.run(run()) == list(range(300_000))
    there.close()


def test_the_end_waits_for_no_reader_that_hangs() -> None:
    here, there = pair()
    here.send(list(range(300_000)))
    asyncio.run(here.flush(0.0))
    assert here._waiting
    here.close()
    there.close()
