"""The other HTTP processes of a server, as each of them sees them, also where there are none.

Counts that decide on a request are in memory that all share: each process writes its own row and
reads the others', so that no count is lost where one is killed. Metrics are asked for.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from mmap import mmap
from typing import Protocol
from zlib import crc32

from lowbit.runtime.images.shared import SharedBytes
from lowbit.runtime.serve.metrics import Counts

CELLS = 1024  # for clients, by a hash of their names
ROW = 1 + CELLS  # a row has the open answers, and then requests of clients
WIDTH = 8  # bytes of a number


class Siblings(Protocol):
    """The other HTTP processes of a server."""

    def set_open(self, answers: int) -> None:
        """Tell the others how many answers of this process have not ended."""

    @property
    def open_elsewhere(self) -> int:
        """Answers of the other processes that have not ended."""

    def add(self, client: str, change: int) -> None:
        """Tell the others of requests of a client, or that they have been answered."""

    def asked_elsewhere(self, client: str) -> int:
        """Requests of a client that other processes have not answered."""

    def locked(self) -> AbstractContextManager[None]:
        """Let no other process decide on a request inside the block."""

    async def counts(self) -> list[Counts]:
        """Metrics of each of the others."""


class Alone:
    """No other process: the one that speaks HTTP is the only one."""

    def set_open(self, answers: int) -> None:
        """See `Siblings`."""

    @property
    def open_elsewhere(self) -> int:
        """See `Siblings`."""
        return 0

    def add(self, client: str, change: int) -> None:
        """See `Siblings`."""

    def asked_elsewhere(self, client: str) -> int:
        """See `Siblings`."""
        return 0

    def locked(self) -> AbstractContextManager[None]:
        """See `Siblings`."""
        return nullcontext()

    async def counts(self) -> list[Counts]:
        """See `Siblings`."""
        return []


class AmongSiblings:
    """Other processes that share memory with this one.

    Two clients may share a cell: each then counts the other's requests as its own.
    """

    def __init__(
        self, memory: SharedBytes, row: int, ask: Callable[[], Awaitable[list[Counts]]]
    ) -> None:
        """Map the memory.

        Args:
            memory: of `new_totals`.
            row: this process's own.
            ask: asks the others for their metrics.
        """
        self._memory = memory  # keeps the descriptor
        self._numbers = memoryview(mmap(memory.descriptor, memory.size)).cast("q")
        self._first, self._ask = row * ROW, ask

    def set_open(self, answers: int) -> None:
        """See `Siblings`."""
        self._numbers[self._first] = answers

    @property
    def open_elsewhere(self) -> int:
        """See `Siblings`."""
        return self._elsewhere(0)

    def add(self, client: str, change: int) -> None:
        """See `Siblings`."""
        self._numbers[self._first + _cell(client)] += change

    def asked_elsewhere(self, client: str) -> int:
        """See `Siblings`."""
        return self._elsewhere(_cell(client))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """See `Siblings`; the system frees the lock of a process that ends."""
        import fcntl  # not on Windows

        fcntl.lockf(self._memory.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._memory.descriptor, fcntl.LOCK_UN)

    async def counts(self) -> list[Counts]:
        """See `Siblings`."""
        return await self._ask()

    def _elsewhere(self, place: int) -> int:
        return sum(self._numbers[place::ROW]) - self._numbers[self._first + place]


def new_totals(processes: int) -> SharedBytes:
    """Memory for the counts of so many processes.

    Raises:
        OSError: the system has none.
    """
    return SharedBytes.of(bytes(processes * ROW * WIDTH))


def _cell(client: str) -> int:
    return 1 + crc32(client.encode(errors="replace")) % CELLS
