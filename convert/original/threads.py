"""A function on every item, or block of work, on all cores; results are in the order of items."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
Pool = ThreadPoolExecutor | None


@contextmanager
def alone_on_threads(device: torch.device) -> Iterator[Pool]:
    """Threads on which torch works alone, one a core; None on a GPU, which needs none.

    torch's own threads meet at the end of every operation, and on cores that are shared or
    limited by quota that is where the time goes (ten times on two busy cores). And sums over
    batches do not depend on how torch would have split an operation.
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
    pool: Pool,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    limit: int | None = None,
) -> Iterator[Result]:
    """Results in order, without gradients, in inference mode where the caller is.

    Args:
        limit: of calls and results that exist at a time; two a thread where left out.
    """
    limit = limit or 2 * torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()

    def call(item: Item) -> Result:
        with torch.inference_mode(inference), torch.no_grad():  # properties of the thread
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


def for_each(pool: Pool, function: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call a function on every item, as `ordered` does."""
    for _ in ordered(pool, function, items):
        pass
