"""Places of downloads: how many there are, for whom, and who gets the next one."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

MOST_PLACES = 32
OF_CLIENT = 16  # of one client
OF_HOST = 8  # of one host, for all clients


@dataclass(slots=True, eq=False)
class Asker:
    """A request that names images."""

    client: str
    running: int = 0  # its downloads


@dataclass(slots=True, eq=False)
class FetchPlaces:
    """Places of downloads; all methods belong to the event loop.

    A client that chooses slow hosts holds no more than its share, and a slow host no more than its
    own. The next place goes to the client that has the fewest, of its requests to the one that has
    the fewest, and to the oldest of those.
    """

    most: int = MOST_PLACES
    of_client: int = OF_CLIENT
    of_host: int = OF_HOST
    _waiting: dict[asyncio.Future[None], tuple[Asker, str]] = field(default_factory=dict)
    _clients: Counter[str] = field(default_factory=Counter)
    _hosts: Counter[str] = field(default_factory=Counter)

    async def take(self, asker: Asker, host: str) -> None:
        """Wait for a place, which `give_back` gives to others."""
        place = asyncio.get_running_loop().create_future()
        self._waiting[place] = asker, host
        self._serve()
        try:
            await place
        except asyncio.CancelledError:
            if self._waiting.pop(place, None) is None:  # it came at the same time
                self.give_back(asker, host)
            raise

    def give_back(self, asker: Asker, host: str) -> None:
        """Let others have a place that was taken."""
        asker.running -= 1
        self._clients -= Counter((asker.client,))  # which drops those that have none left
        self._hosts -= Counter((host,))
        self._serve()

    def _serve(self) -> None:
        """Give free places to those that wait."""
        while (place := self._next()) is not None:
            asker, host = self._waiting.pop(place)
            asker.running += 1
            self._clients[asker.client] += 1
            self._hosts[host] += 1
            place.set_result(None)

    def _next(self) -> asyncio.Future[None] | None:
        """The next to have a place; None while there is none for anybody that waits."""
        if self._clients.total() >= self.most:
            return None
        may = (
            (self._clients[asker.client], asker.running, place)
            for place, (asker, host) in self._waiting.items()
            if self._clients[asker.client] < self.of_client
            and self._hosts[host] < self.of_host
            and not place.done()
        )
        return min(may, key=lambda each: each[:2], default=(0, 0, None))[2]
