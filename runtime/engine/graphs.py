"""What recording a decode step as a CUDA graph takes, whatever the step does."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch


@contextmanager
def aside() -> Iterator[None]:
    """A stream of its own for the run that must come before a capture.

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


def recorded(
    step: Callable[[], None], others: Mapping[int, torch.cuda.CUDAGraph]
) -> torch.cuda.CUDAGraph:
    """A step as a graph, in the memory of others that never run at the same time.

    Args:
        step: what is recorded, not run; it has run before, so that its kernels are compiled.
        others: graphs of one memory pool.
    """
    graph = torch.cuda.CUDAGraph()
    pool = next(iter(others.values())).pool() if others else None
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph
