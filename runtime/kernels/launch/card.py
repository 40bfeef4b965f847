"""Card: a kind of GPU, as far as launches depend on it. Nothing is queried and nothing imported."""

from dataclasses import dataclass

MULTIPROCESSORS = 132  # of an H200, and of an H100 for SXM
LEAST_CAPABILITY = (8, 0)  # below it there are no products of BF16
COMPILED = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))  # kernels are compiled for these in tests
RESERVED = 1 << 10  # bytes of shared memory of each program that are the driver's
REGISTERS = 65536  # of a multiprocessor, of every card from 8.0 to 12.0
OLDER_REGISTERS = 168  # of a thread before Hopper, where a launch names none
TIGHT = 80  # registers of a thread


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU."""

    capability: tuple[int, int]  # compute capability
    multiprocessors: int = MULTIPROCESSORS  # of the card

    @property
    def is_hopper(self) -> bool:
        """True if it has `wgmma`."""
        return self.capability[0] == 9

    @property
    def overlaps(self) -> bool:
        """True if a kernel may start before the one ahead ends (`programmatic_launch`)."""
        return self.capability >= (9, 0)

    @property
    def _is_small(self) -> bool:
        """True for cards of desktops, whose multiprocessors have less shared memory."""
        return self.capability in ((8, 6), (8, 9)) or self.capability >= (12, 0)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a program may take."""
        if self._is_small:
            return 99 << 10
        return (163 if self.capability < (9, 0) else 227) << 10

    @property
    def threads(self) -> int:
        """Threads that a multiprocessor has room for."""
        return 1536 if self._is_small or self.capability == (8, 7) else 2048

    def register_cap(self, measured: int | None) -> int | None:
        """Most registers of a thread, given the best on Hopper; None leaves them to the compiler.

        After Hopper the compiler spills more often with a cap. Before it spills more often without,
        but where Hopper's is tight: it takes fewer registers by itself then.
        """
        if self.overlaps:
            return measured if self.is_hopper else None
        return None if measured is not None and measured <= TIGHT else measured or OLDER_REGISTERS


CPU = Card((0, 0))  # where kernels are interpreted
H200 = Card((9, 0))  # which launches were measured on


def power_of_two(n: int) -> int:
    """Round n up to a power of two: kernels are compiled for these counts."""
    return 1 << (n - 1).bit_length()
