"""Counts of several HTTP processes in memory that all of them share.

Each process writes its own row and reads the others', so that no count is lost where one is killed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from zlib import crc32

from lowbit.runtime.images.shared import SharedBytes

CELLS = 1024  # for clients, by a hash of their names
ROW = 1 + CELLS  # a row has the open answers, and then requests of clients
WIDTH = 8  # bytes of a number


class Totals:
    """Answers and requests of all HTTP processes of a server.

    Two clients may share a cell: each then counts the other's requests as its own.
    """

    def __init__(self, memory: SharedBytes, row: int) -> None:
        """Map memory of `new_totals`; `row` is this process's own."""
        self._memory = memory  # keeps the descriptor
        self._numbers = memoryview(mmap(memory.descriptor, memory.size)).cast("q")
        self._first = row * ROW

    def set_open(self, answers: int) -> None:
        """Tell the others how many answers of this process have not ended."""
        self._numbers[self._first] = answers

    @property
    def open_elsewhere(self) -> int:
        """Answers of the other processes that have not ended."""
        return self._elsewhere(0)

    def add(self, client: str, change: int) -> None:
        """Count requests of a client, or take them back."""
        self._numbers[self._first + _cell(client)] += change

    def asked_elsewhere(self, client: str) -> int:
        """Requests of a client that other processes have not answered."""
        return self._elsewhere(_cell(client))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock of all processes; the system frees that of a process that ends."""
        import fcntl  # not on Windows

        fcntl.lockf(self._memory.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._memory.descriptor, fcntl.LOCK_UN)

    def _elsewhere(self, place: int) -> int:
        return sum(self._numbers[place::ROW]) - self._numbers[self._first + place]


def new_totals(processes: int) -> SharedBytes:
    """Memory for the totals of so many processes.

    Raises:
        OSError: the system has none.
    """
    return SharedBytes.of(bytes(processes * ROW * WIDTH))


def _cell(client: str) -> int:
    return 1 + crc32(client.encode(errors="replace")) % CELLS
