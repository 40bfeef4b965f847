"""Pools of pages, rows or slots, with counts of owners."""

from collections.abc import Iterable
from heapq import heappop, heappush


class Pool:
    """Pool of the numbers from `first` to `count` - 1; a number without owners is free.

    The lowest free numbers go first, so numbers taken together are mostly adjacent.
    """

    def __init__(self, count: int, first: int = 1) -> None:
        """Begin with all numbers free."""
        self._free = list(range(first, count))
        self._owners = [0] * count

    @property
    def free(self) -> int:
        """Count the free numbers."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take so many numbers, one owner each; the caller has checked that they are free."""
        taken = [heappop(self._free) for _ in range(count)]
        for number in taken:
            self._owners[number] = 1
        return taken

    def share(self, numbers: Iterable[int]) -> None:
        """Add an owner to each of the numbers, which have one."""
        for number in numbers:
            self._owners[number] += 1

    def drop(self, numbers: Iterable[int]) -> None:
        """Remove an owner from each of the numbers."""
        for number in numbers:
            self._owners[number] -= 1
            if self._owners[number] == 0:
                heappush(self._free, number)

    def owners(self, number: int) -> int:
        """Count the owners of a number."""
        return self._owners[number]
