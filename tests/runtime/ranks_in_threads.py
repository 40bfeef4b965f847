"""Ranks as threads of one process, which exchange tensors at a barrier."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from lowbit.runtime.backends.exchange import Exchange
from lowbit.runtime.weights.share import Share

T = TypeVar("T")
WAIT_S = 60.0


@dataclass(frozen=True)
class Meeting:
    ranks: int
    barrier: Barrier
    parts: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ThreadExchange:
    share: Share
    meeting: Meeting

    def total(self, partial: Tensor) -> Tensor:
        assert partial.dtype == torch.float32
        first, *others = self._all(partial)
        for other in others:
            first = first + other
        return first

    def side_by_side(self, part: Tensor, widths: tuple[int, ...]) -> Tensor:
        assert part.shape[1] == widths[self.share.rank]
        return torch.cat(self._all(part), dim=1)

    def _all(self, own: Tensor) -> list[Tensor]:
        self.meeting.parts[self.share.rank] = own
        self.meeting.barrier.wait(WAIT_S)
        found = [self.meeting.parts[rank] for rank in range(self.meeting.ranks)]
        self.meeting.barrier.wait(WAIT_S)
        return found


def on_each_rank(ranks: int, work: Callable[[Exchange], T]) -> list[T]:
    """Results of some work that every rank does."""
    meeting = Meeting(ranks, Barrier(ranks))

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            return work(ThreadExchange(Share(rank, ranks), meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))
