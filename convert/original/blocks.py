"""Independent blocks of work on all cores."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from lowbit.convert.original.threads import alone_on_threads

BlockMap = Callable[[Callable[[slice], None], Iterable[slice]], None]


@contextmanager
def block_map(device: torch.device) -> Iterator[BlockMap]:
    """A function that calls another on every block: one CPU thread a block, or in turn on a GPU.

    torch's own threads meet at the end of every operation, and on cores that are shared or
    limited by quota that is where the time goes (ten times on two busy cores). Within a block
    torch therefore works alone; the caller's number of threads is restored at the end.
    """
    with alone_on_threads(device) as pool:

        def spread(function: Callable[[slice], None], blocks: Iterable[slice]) -> None:
            def alone(block: slice) -> None:
                with torch.inference_mode():  # a property of the thread
                    function(block)

            for _ in map(alone, blocks) if pool is None else pool.map(alone, blocks):
                pass

        yield spread
