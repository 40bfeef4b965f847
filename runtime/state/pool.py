"""Numbers of pages, rows or slots that are free, and how many owners the others have."""

from collections.abc import Iterable
from heapq import heappop, heappush


class Pool:
    """Hands out the numbers from `first` to `count` - 1; one whose last owner drops it is free.

    The lowest free numbers go first, so that those taken together mostly follow one another.
    """

    def __init__(self, count: int, first: int = 1) -> None:
        """All numbers are free."""
        self._free = list(range(first, count))
        self._owners = [0] * count

    @property
    def free(self) -> int:
        """Numbers that can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Numbers with one owner each; the caller has checked that so many are free."""
        taken = [heappop(self._free) for _ in range(count)]
        for number in taken:
            self._owners[number] = 1
        return taken

    def share(self, numbers: Iterable[int]) -> None:
        """Add an owner to numbers that have one."""
        for number in numbers:
            self._owners[number] += 1

    def drop(self, numbers: Iterable[int]) -> None:
        """Take an owner away."""
        for number in numbers:
            self._owners[number] -= 1
            if self._owners[number] == 0:
                heappush(self._free, number)

    def owners(self, number: int) -> int:
        """Owners of a number."""
        return self._owners[number]
