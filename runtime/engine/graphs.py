"""Decode steps recorded as CUDA graphs."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

MOST_GRAPHS = 64  # each takes some megabytes of the driver's memory


class Graphs:
    """Recorded steps by key, in one pool of memory, since no two run at the same time.

    The least recently used is dropped where there are too many.
    """

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        """None is recorded yet."""
        self._most = most
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        """True if the step is recorded."""
        return key in self._graphs

    def __len__(self) -> int:
        """Recorded steps."""
        return len(self._graphs)

    def record(self, key: Hashable, step: Callable[[], None]) -> None:
        """Record a step, which has run before, so that its kernels are compiled."""
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            step()
        self._graphs[key] = graph
        if len(self._graphs) > self._most:
            torch.cuda.synchronize()
            self._graphs.popitem(last=False)

    def replay(self, key: Hashable) -> None:
        """Run a recorded step; the host does not wait for it."""
        self._graphs.move_to_end(key)
        self._graphs[key].replay()


@contextmanager
def aside() -> Iterator[None]:
    """A stream of its own for the run that must come before a recording.

    It begins when all that is under way has ended, and what comes after waits for it.
    """
    torch.cuda.synchronize()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            yield
    finally:  # after Ctrl-C too: what has been launched still runs
        torch.cuda.current_stream().wait_stream(side)
