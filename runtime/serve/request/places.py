"""Places for work on images: how many there are, for whom, and who gets the next one."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

MOST_DOWNLOADS = 32
CLIENT_DOWNLOADS = 16  # of one client
HOST_DOWNLOADS = 8  # from one host, for all clients


@dataclass(slots=True, eq=False)
class Asker:
    """A request that names images."""

    client: str
    running: int = 0  # places that it has


@dataclass(slots=True, eq=False)
class Places:
    """Places for downloads, by default, or other work; all methods belong to the event loop.

    A client that chooses slow hosts holds no more than its share, and a slow host no more than its
    own. The next place goes to the client that has the fewest, of its requests to the one that has
    the fewest, and to the oldest of those.
    """

    most: int = MOST_DOWNLOADS
    of_client: int = CLIENT_DOWNLOADS
    of_host: int = HOST_DOWNLOADS
    _waiting: dict[asyncio.Future[None], tuple[Asker, str]] = field(default_factory=dict)
    # Places that are taken: of each client, of each host, and all
    _clients: Counter[str] = field(default_factory=Counter)
    _hosts: Counter[str] = field(default_factory=Counter)
    _taken: int = 0

    async def take(self, asker: Asker, host: str = "") -> None:
        """Wait for a place, which `give_back` gives to others.

        Args:
            host: that is asked for an image; empty for work on this machine.
        """
        place = asyncio.get_running_loop().create_future()
        self._waiting[place] = asker, host
        self._serve()
        try:
            await place
        except asyncio.CancelledError:
            if self._waiting.pop(place, None) is None:  # it came at the same time
                self.give_back(asker, host)
            raise

    def take_free(self, asker: Asker) -> bool:
        """Take a place for work on this machine, if one is free and nobody waits; else False."""
        if self._waiting or self._taken >= self.most or not self._may_have(asker, ""):
            return False
        self._count(asker, "")
        return True

    def give_back(self, asker: Asker, host: str = "") -> None:
        """Let others have a place that was taken."""
        asker.running -= 1
        self._taken -= 1
        for counts, name in ((self._clients, asker.client), (self._hosts, host)):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]
        self._serve()

    def _serve(self) -> None:
        """Give free places to those that wait."""
        while (place := self._next()) is not None:
            asker, host = self._waiting.pop(place)
            self._count(asker, host)
            place.set_result(None)

    def _count(self, asker: Asker, host: str) -> None:
        asker.running += 1
        self._clients[asker.client] += 1
        self._hosts[host] += 1
        self._taken += 1

    def _may_have(self, asker: Asker, host: str) -> bool:
        """True if a client and a host have fewer places than their shares."""
        return self._clients[asker.client] < self.of_client and self._hosts[host] < self.of_host

    def _next(self) -> asyncio.Future[None] | None:
        """The next to have a place; None while there is none for anybody that waits."""
        if self._taken >= self.most or not self._waiting:
            return None
        may = (
            (self._clients[asker.client], asker.running, place)
            for place, (asker, host) in self._waiting.items()
            if self._may_have(asker, host) and not place.done()
        )
        return min(may, key=lambda each: each[:2], default=(0, 0, None))[2]
