"""Messages arrive whole and in order, whatever the socket takes at once."""

import asyncio
import gc
import os
import socket
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lowbit.runtime.images.shared import SharedBytes
from lowbit.runtime.serve.link import channel
from lowbit.runtime.serve.link.channel import LENGTH, READ, Channel, SharedSocket


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


@pytest.mark.parametrize("flag", [channel.CLOSE_ON_EXEC, None], ids=["linux", "macos"])
def test_processes_get_no_files_that_came_here(
    flag: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "CLOSE_ON_EXEC", flag)
    here, there = pair(list[SharedBytes])
    here.send([SharedBytes.of(b"first"), SharedBytes.of(b"second")])
    [message] = asyncio.run(taken(there, 1))
    assert [os.get_inheritable(each.descriptor) for each in message] == [False, False]
    assert [bytes(each.take()) for each in message] == [b"first", b"second"]
    here.close()
    there.close()


def test_nothing_of_a_message_is_kept_until_the_next_one_comes() -> None:
    """Files that come with them may be large."""
    here, there = pair(list[SharedBytes])

    async def run() -> bool:
        seen: list[weakref.ref[SharedBytes]] = []

        async def read() -> None:
            async for message in there.receive():
                seen.append(weakref.ref(message[0]))
                del message

        reading = asyncio.create_task(read())
        here.send([SharedBytes.of(b"file")])
        while not seen:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        kept = seen[0]() is not None
        here.close()
        await reading
        return kept

    assert not asyncio.run(run())
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


OPEN = Path("/proc/self/fd")


class Shown(msgspec.Struct, array_like=True):
    """A message of numbers, and of bytes that are shared."""

    numbers: list[int]
    shared: list[SharedBytes]


def contents(message: Shown) -> tuple[int, list[bytes]]:
    return message.numbers[0], [bytes(each.take()) for each in message.shared]


@pytest.mark.parametrize("read_first", [True, False], ids=["at once", "waiting"])
def test_shared_bytes_come_with_their_message(read_first: bool) -> None:
    """Also behind what the socket had no room for, and in front of others."""
    here, there = pair(Shown)
    sent = [
        (number, [bytes([number, 7]) * (1 + 9000 * place) for place in range(number % 4)])
        for number in range(40)
    ]

    async def run() -> list[Any]:
        first = asyncio.create_task(taken(here, 1))
        await asyncio.sleep(0)
        reading = asyncio.create_task(taken(there, len(sent)))
        for number, parts in sent:
            many = [number] * (1 + number % 5 * 60_000)
            here.send(Shown(many, [SharedBytes.of(each) for each in parts]))
            if read_first:
                await asyncio.sleep(0)
        found = await reading
        there.send(Shown([1], []))
        await first
        return found

    assert [contents(each) for each in asyncio.run(run())] == sent
    here.close()
    there.close()


@pytest.mark.skipif(not OPEN.exists(), reason="the system does not list open files")
def test_files_are_closed_once_nobody_needs_them() -> None:
    here, there = pair(Shown)
    before = len(list(OPEN.iterdir()))
    for number in range(3):
        here.send(Shown([number], [SharedBytes.of(b"x")]))
    [first] = asyncio.run(taken(there, 1))
    assert contents(first) == (0, [b"x"])
    here.close()
    there.close()
    gc.collect()
    assert len(list(OPEN.iterdir())) <= before - 2


class Given(msgspec.Struct, array_like=True):
    connection: SharedSocket
    beside: SharedBytes


def test_a_socket_is_handed_on_and_left_by_its_sender() -> None:
    here, there = pair(Given)
    client, connection = socket.socketpair()
    here.send(Given(SharedSocket.of(connection), SharedBytes.of(b"y")))
    assert connection.fileno() == -1
    [found] = asyncio.run(taken(there, 1))
    assert bytes(found.beside.take()) == b"y"
    with found.connection.take() as taker, client:
        taker.sendall(b"x")
        assert client.recv(2) == b"x"
        taker.close()
        assert client.recv(2) == b""  # nobody else has it
    here.close()
    there.close()


def test_files_that_the_system_loses_end_what_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Later messages would get the files of earlier ones."""
    here, there = pair(Shown)
    here.send(Shown([1], [SharedBytes.of(b"x")]))
    monkeypatch.setattr(there, "_space", 0)

    async def all_of() -> list[Any]:
        return [message async for message in there.receive()]

    assert asyncio.run(all_of()) == []
    assert "may open no more files" in caplog.text
    here.close()
    there.close()


def test_a_message_that_cannot_be_sent_leaves_no_file_to_the_next() -> None:
    here, there = pair(Shown)
    with pytest.raises(NotImplementedError, match="no message carries object"):
        here.send(Shown([1], [SharedBytes.of(b"x"), object()]))  # type: ignore[list-item]
    here.send(Shown([2], [SharedBytes.of(b"y")]))
    [found] = asyncio.run(taken(there, 1))
    assert contents(found) == (2, [b"y"])
    here.close()
    there.close()


def test_a_message_whose_file_is_missing_is_damaged() -> None:
    ours, theirs = socket.socketpair()
    here: Channel[Any] = Channel(ours, Shown)
    content = msgspec.msgpack.encode([[1], [5]])
    theirs.send(len(content).to_bytes(LENGTH, "little") + content)
    with pytest.raises(NotImplementedError, match="no file came"):
        asyncio.run(taken(here, 1))
    here.close()
    theirs.close()
