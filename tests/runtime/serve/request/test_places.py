"""Places of downloads: shares of clients and hosts, and whose turn it is."""

import asyncio
from collections.abc import Awaitable, Callable

from lowbit.runtime.serve.request.places import Asker, Places


class Queue:
    """Tasks that wait for places, and the names of those that have one, in their order."""

    def __init__(self, places: Places) -> None:
        self.places, self.got = places, list[str]()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, asker: Asker, host: str = "host") -> None:
        async def take() -> None:
            await self.places.take(asker, host)
            self.got.append(name)

        self.tasks[name] = asyncio.create_task(take())
        await self.turn()

    async def turn(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_a_host_has_its_share() -> None:
    async def test() -> None:
        queue, one, two = Queue(Places(most=9, of_host=2)), Asker("a"), Asker("b")
        for number in range(3):
            await queue.ask(f"slow {number}", one, "slow")
        await queue.ask("slow of another", two, "slow")
        await queue.ask("fast", one, "fast")
        assert queue.got == ["slow 0", "slow 1", "fast"]
        queue.places.give_back(one, "slow")
        await queue.turn()
        assert queue.got[3:] == ["slow of another"]  # has fewer

    run(test)


def test_a_client_has_its_share_whatever_hosts_it_names() -> None:
    async def test() -> None:
        queue = Queue(Places(most=4, of_client=3))
        for number in range(9):
            await queue.ask(f"bad {number}", Asker("bad"), f"host {number}")
        await queue.ask("good", Asker("good"), "host 1")
        assert queue.got == ["bad 0", "bad 1", "bad 2", "good"]

    run(test)


def test_the_next_place_goes_to_the_client_and_the_request_with_the_fewest() -> None:
    async def test() -> None:
        queue = Queue(Places(most=3))
        long, short, other = Asker("a"), Asker("a"), Asker("b")
        for number in range(5):
            await queue.ask(f"long {number}", long)
        await queue.ask("short", short)
        await queue.ask("other", other)
        assert queue.got == ["long 0", "long 1", "long 2"]
        for ended, expected in ((long, "other"), (long, "short"), (other, "long 3")):
            queue.places.give_back(ended, "host")
            await queue.turn()
            assert queue.got[-1] == expected

    run(test)


def test_a_free_place_is_taken_past_nobody() -> None:
    async def test() -> None:
        places = Places(most=3, of_client=2)
        queue, one, two = Queue(places), Asker("a"), Asker("b")
        assert [places.take_free(one) for _ in range(3)] == [True, True, False]  # its share
        assert places.take_free(two)
        assert not places.take_free(Asker("c"))  # all are taken
        await queue.ask("waits", two, "")
        places.give_back(one)
        assert not places.take_free(Asker("c"))  # it is for the one that waited
        await queue.turn()
        assert queue.got == ["waits"]
        assert (one.running, two.running) == (1, 2)

    run(test)


def test_a_free_place_is_within_the_share_of_a_host() -> None:
    async def test() -> None:
        places = Places(most=3, of_host=1)
        assert places.take_free(Asker("a"))
        assert not places.take_free(Asker("b"))

    run(test)


def test_who_leaves_takes_nothing_with_it() -> None:
    async def test() -> None:
        queue, one = Queue(Places(most=1)), Asker("a")
        for name in ("first", "gone", "third"):
            await queue.ask(name, one)
        queue.tasks["gone"].cancel()
        await queue.turn()
        queue.places.give_back(one, "host")
        queue.tasks["third"].cancel()  # just as it gets its place
        await queue.turn()
        assert queue.got == ["first"]
        await queue.ask("last", one)
        assert queue.got == ["first", "last"]
        queue.places.give_back(one, "host")
        assert one.running == 0
        assert not queue.places._hosts
        assert not queue.places._clients
        assert not queue.places._waiting

    run(test)
