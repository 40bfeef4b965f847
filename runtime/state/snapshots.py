"""Snapshots of recurrent states in memory of the host, from which later prompts go on.

A state takes 20 MB (0.8B, 2B) to 154 MB (27B), and a long conversation leaves dozens. So none stays
on a GPU. A copy to page-locked memory passes through a buffer there: steps wait until the state is
in the buffer, not for the bus, and the host waits for neither. A copy back precedes the steps that
need it.

Page-locked memory takes half a millisecond a megabyte, 25 ms for a state of a 4B, and a turn of a
chat leaves two or three. So it is allocated while nobody waits, piece by piece: see `prepare`.
"""

import logging
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lowbit.formats.architectures.footprint import STAGED
from lowbit.runtime.state.delta import DeltaSlots

log = logging.getLogger("lowbit")
LEAST_PIECE, MOST_PIECE = 1 << 20, 8 << 20  # bytes; the larger takes 4 ms
READY_BYTES = 2 << 30  # page-locked memory that waits for snapshots: 41 states of a 4B


class Snapshots:
    """Snapshots by number, each in memory of its own from the number's first use on.

    Attributes:
        count: numbers from 0 on that there are at most; 0 without linear layers.
    """

    def __init__(self, slots: DeltaSlots, count: int, staged: bool) -> None:
        """Begin without snapshots."""
        self.count = count if slots.count else 0
        self._slots = slots
        size, device = slots.slot_bytes, slots.memory.device
        self._sizes = piece_sizes(size) if staged else [size]  # of a snapshot's pieces of memory
        self._kept: dict[int, list[Tensor]] = {}
        self._ready: list[list[Tensor]] = []  # memory for others; the last may lack pieces
        self._refused = False  # the system has refused some, and is asked when it is needed
        buffers = STAGED if staged and slots.count else 0
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device) for _ in range(buffers)
        ]

    @property
    def staged_bytes(self) -> int:
        """Memory of the buffers on a GPU."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def most_bytes(self) -> int:
        """Memory of the host that `count` snapshots take."""
        return self.count * self._slots.slot_bytes

    def save(self, slot: int, number: int) -> None:
        """Make a snapshot of the state that the steps under way leave in a slot."""
        if number not in self._kept:
            self._kept[number] = self._take_memory()
        kept = self._kept[number]
        if not self._buffers:
            self._slots.pack(slot, kept[0])
            return
        copy = self._bus.next()
        copy.done.wait()  # the buffer's last one
        self._slots.pack(slot, copy.buffer)
        copy.filled.record()
        with torch.cuda.stream(self._bus.stream):
            copy.filled.wait()
            for piece, part in zip(kept, torch.split(copy.buffer, self._sizes), strict=True):
                piece.copy_(part, non_blocking=True)
            copy.done.record()

    def restore(self, number: int, slot: int) -> None:
        """Copy a snapshot to a slot, behind the steps under way and before all later ones."""
        kept = self._kept[number]
        if not self._buffers:
            self._slots.unpack(kept[0], slot)
            return
        for copy in self._bus.copies:  # one may be to this snapshot, one from the buffer
            copy.done.wait()
        buffer = self._bus.next().buffer
        for piece, part in zip(kept, torch.split(buffer, self._sizes), strict=True):
            part.copy_(piece, non_blocking=True)
        self._slots.unpack(buffer, slot)

    @property
    def lacks_memory(self) -> bool:
        """True while `prepare` has something to do."""
        if not self._buffers or self._refused:  # what is not page-locked takes no time
            return False
        most = min(self.count - len(self._kept), READY_BYTES // self._slots.slot_bytes)
        return sum(len(each) == len(self._sizes) for each in self._ready) < most

    def prepare(self) -> None:
        """Allocate a piece of the memory that later snapshots will need.

        Nobody needs it yet: where the system refuses it, a warning says so and nothing is raised,
        which would end all ranks.
        """
        if self._refused:  # while another rank still has some
            return
        if not self._ready or len(self._ready[-1]) == len(self._sizes):
            self._ready.append([])
        last = self._ready[-1]
        try:
            last.append(self._new_memory(self._sizes[len(last)]))
        except (RuntimeError, MemoryError) as error:  # the former of CUDA
            self._refused = True
            reason = str(error).strip().split("\n")[0]
            log.warning("memory for later snapshots is not locked ahead: %s", reason)

    def _take_memory(self) -> list[Tensor]:
        """Memory for a snapshot; pieces that are not ready are allocated now."""
        found = self._ready.pop(0) if self._ready else []
        return found + [self._new_memory(size) for size in self._sizes[len(found) :]]

    def _new_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=bool(self._buffers))

    @cached_property
    def _bus(self) -> "_Bus":
        return _Bus(self._buffers)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A buffer on a GPU, and the events of the last copy from there to the host."""

    buffer: Tensor
    filled: torch.cuda.Event
    done: torch.cuda.Event


class _Bus:
    """The stream of copies to the host, and the buffers that they take turns in."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.copies = [
            _Copy(buffer, torch.cuda.Event(), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for buffer in buffers
        ]

    def next(self) -> _Copy:
        """The buffer whose last copy is the oldest."""
        self.copies.append(self.copies.pop(0))
        return self.copies[-1]


def piece_sizes(size: int) -> list[int]:
    """Cut a size into powers of two, of MOST_PIECE at most, and a rest below LEAST_PIECE.

    PyTorch rounds page-locked memory up to a power of two, which would add up to the size again.

    >>> piece_sizes((18 << 20) + 7)
    [8388608, 8388608, 2097152, 7]
    """
    sizes = []
    while size >= LEAST_PIECE:
        sizes.append(min(1 << (size.bit_length() - 1), MOST_PIECE))
        size -= sizes[-1]
    return [*sizes, size] if size else sizes
