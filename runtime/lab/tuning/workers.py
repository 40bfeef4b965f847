"""Processes that compile the kernels of a step beside each other, without touching the GPU.

Each acts as if it were on such a card (`lab.fake_gpu`), so no other process has a context on the
GPU: that alone would change what is measured there (LOG.md, "Two states"). What they compile lies
in Triton's cache afterwards.
"""

import atexit
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from lowbit.formats.errors import ResourceError
from lowbit.formats.machine.cores import core_count
from lowbit.runtime.kernels.launch.card import Card
from lowbit.runtime.kernels.launch.linear import GemvLaunch, Tuned
from lowbit.runtime.lab.compile import INTERPRET
from lowbit.runtime.models.loader import OpenedModel

if TYPE_CHECKING:
    from lowbit.runtime.kernels.launch.tuned import Size
    from lowbit.runtime.lab.tuning.step import ShortSteps

MOST_WORKERS = 32
WORKER_BYTES = 700 << 20  # of one with PyTorch and Triton


@dataclass(frozen=True, slots=True)
class Job:
    """Kernels of a step to be compiled."""

    tokens: int  # of the step
    launches: "Mapping[Size, Tuned]"  # of linears
    # compile what has this launch; None for the kernels of a share
    wanted: GemvLaunch | None = None
    share: int = 0  # number of the share
    shares: int = 1  # into which all other kernels of the step are dealt out


@dataclass(frozen=True, slots=True)
class Workers:
    """Processes that compile."""

    pool: ProcessPoolExecutor  # of them
    count: int  # of them

    def compile(self, jobs: Sequence[Job], seconds: float) -> Iterator[int]:
        """Numbers of the jobs whose kernels are there, as they are done, until the time is over.

        Raises:
            ResourceError: a process was killed.
        """
        pending: dict[Future[bool], int] = {
            self.pool.submit(_compile, job): number for number, job in enumerate(jobs)
        }
        try:
            for done in as_completed(pending, timeout=seconds):
                if done.result():
                    yield pending[done]
        except TimeoutError:
            return
        except BrokenProcessPool:
            raise ResourceError(
                "a process that compiles kernels has ended, which is mostly for want of memory",
                hint="free some memory, or give --workers a smaller number",
            ) from None
        finally:
            for each in pending:
                each.cancel()


@contextmanager
def new_workers(
    opened: OpenedModel, card: Card, tokens: int, count: int | None
) -> Iterator[Workers]:
    """Start the processes.

    Args:
        opened: the short model, without functions that read weights.
        count: of processes; None for as many as there are cores and there is memory for.
    """
    count = count or worker_count()
    pool = ProcessPoolExecutor(
        count,
        get_context("spawn"),
        initializer=_begin,
        initargs=(opened, card, tokens),
    )
    try:
        yield Workers(pool, count)
    finally:
        pool.shutdown(cancel_futures=True)


def worker_count() -> int:
    """One for each core but one, as far as memory goes."""
    from lowbit.formats.machine.memory import free_bytes

    free = free_bytes("cpu")
    room = MOST_WORKERS if free is None else free // WORKER_BYTES
    return max(1, min(core_count() - 1, room, MOST_WORKERS))


@dataclass(slots=True)
class _Filter:
    """Compiled kernels of the launches of a step."""

    job: Job  # of the process
    # numbers of the kernels of the step, by what decides about them
    seen: dict[str, int] = field(default_factory=dict)
    failed: bool = False  # a kernel that was wanted could not be compiled

    def takes(self, kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Tell if a launch is one to compile."""
        launch = getattr(options.get("PLAN"), "LAUNCH", None)
        if self.job.wanted is not None:
            return launch == self.job.wanted
        kinds = [getattr(each, "dtype", type(each)) for each in arguments]
        key = f"{kernel.__name__} {kinds} {options}"
        number = self.seen.setdefault(key, len(self.seen))
        return number % self.job.shares == self.job.share


_given: list[Any] = []  # model, card and tokens of the process


def _begin(*given: Any) -> None:
    """Keep what the process is for; the rest waits for the first job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the process
    atexit.register(os._exit, 0)  # Triton's bindings would list what they still hold
    os.environ.pop(INTERPRET, None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _given[:] = given


@cache
def _steps(tokens: int) -> "tuple[ShortSteps, list[_Filter]]":
    """Steps of so many tokens, and the place of the filter of what they launch."""
    from lowbit.runtime.lab.tuning.step import short_steps

    runner, filters = _runner()
    return short_steps(runner, tokens), filters


@cache
def _runner() -> tuple[Any, list[_Filter]]:
    import torch

    from lowbit.runtime.lab.fake_gpu import compile_only, fake_gpu
    from lowbit.runtime.lab.tuning.short_model import new_short_runner

    torch.set_num_threads(1)
    opened, card, tokens = _given
    filters = list[_Filter]()

    def compile_some(kernel: Any, grid: Any, arguments: Any, named: Mapping[str, Any]) -> None:
        if not filters[0].takes(kernel, arguments, named):
            return
        try:
            compile_only(kernel, grid, arguments, named)
        except Exception:  # whatever a compiler raises
            filters[0].failed = True

    fake_gpu(card, compile_some)
    return new_short_runner(opened, "meta", tokens), filters


def _compile(job: Job) -> bool:
    """Compile the kernels of a job; False where one cannot be."""
    steps, filters = _steps(job.tokens)
    filters[:] = [_Filter(job)]
    steps.send(job.launches)
    return not filters[0].failed
