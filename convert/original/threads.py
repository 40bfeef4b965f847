"""A function on every item, or block of work, on all cores; results are in the order of items."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
BlockMap = Callable[[Callable[[slice], None], Iterable[slice]], None]


@contextmanager
def alone_on_threads(device: torch.device) -> Iterator[ThreadPoolExecutor | None]:
    """Threads on which torch works alone, one a core; None on a GPU, which needs none.

    Sums over batches then do not depend on how torch would have split an operation.
    """
    if device.type != "cpu":
        yield None
        return
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            yield pool
        finally:
            torch.set_num_threads(threads)


def ordered(
    pool: ThreadPoolExecutor | None,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    limit: int | None = None,
) -> Iterator[Result]:
    """Results in order, without gradients.

    Args:
        pool: of `alone_on_threads`.
        function: independent of the order of calls.
        items: its arguments.
        limit: of calls and results that exist at a time; two a thread where left out.
    """
    limit = limit or 2 * torch.get_num_threads()

    def call(item: Item) -> Result:
        with torch.no_grad():  # a property of the thread
            return function(item)

    if pool is None:
        yield from map(call, items)
        return
    ahead: deque[Future[Result]] = deque()
    for item in items:
        ahead.append(pool.submit(call, item))
        if len(ahead) >= limit:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


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
