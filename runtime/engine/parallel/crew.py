"""The other ranks of a model: processes of this machine that the first rank starts and leads.

A task is sent to all of them and done by this rank in a thread of its own, to its end: an
interrupted caller leaves no rank halfway in a layer. Whatever fails in a task ends all ranks.
"""

import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from socket import socketpair
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.machine.interrupts import interrupts_blocked
from lowbit.formats.machine.system import explained
from lowbit.runtime.backends.exchange import Exchange, PartedError, check_gloo, meet, removed
from lowbit.runtime.engine.parallel.gpus import Watch, meet_gpus
from lowbit.runtime.engine.parallel.members import (
    AGAIN,
    Member,
    Stops,
    failure,
    look,
    silence,
    wait_for,
)
from lowbit.runtime.engine.parallel.messages import (
    ENDING_S,
    EXCHANGE_S,
    LOADING_S,
    LOOK_S,
    MEET_S,
    START_S,
    STOPPED_S,
    Arrived,
    Failed,
    Met,
    Ready,
    Setup,
    encoded,
)
from lowbit.runtime.engine.plan import MOST_CHUNK
from lowbit.runtime.models.loader import OpenedModel
from lowbit.runtime.models.ranks import load_rank, load_rank_on_gpu, load_target
from lowbit.runtime.models.shared_decoder import SharedDecoder
from lowbit.runtime.weights.share import Share

if TYPE_CHECKING:
    from lowbit.runtime.kernels.ptx.peers import Peers
    from lowbit.runtime.models.loader import Decoder

T = TypeVar("T")
Job = tuple[Callable[[], Any], "Future[Any]"]
MODULE = "lowbit.runtime.engine.parallel.start"


class Crew:
    """The other ranks; see `shared_decoder.Crew`.

    Attributes:
        members: their processes.
        exchange: this rank's way to them, for tasks alone.
        peers: the way of GPUs to each other; None on a CPU.
        close: ends them; they end with this object, too, and with this process. In a fork of it
            they go on.
    """

    def __init__(
        self,
        members: Sequence[Member],
        exchange: Exchange,
        threads: int,
        peers: "Peers | None" = None,
    ) -> None:
        """Begin with members that have met."""
        self.members, self.exchange, self.peers = members, exchange, peers
        self._lost: LowbitError | None = None
        self._losing = threading.Lock()  # a lost rank is seen by its task and by whoever looks
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._watch = None if peers is None else Watch(members, peers.aborted)
        self.close = weakref.finalize(self, _close, members, self._jobs, os.getpid(), self._watch)
        # A daemon: the end of this process waits for no rank that does not answer.
        arguments = (self._jobs, threads)
        self._worker = threading.Thread(
            target=_work, args=arguments, name="lowbit-rank", daemon=True
        )
        self._worker.start()

    @property
    def through_host(self) -> bool:
        """True if GPUs exchange through memory of the host."""
        return self.peers is not None and self.peers.own.is_cpu

    @property
    def problem(self) -> LowbitError | None:
        """Why no task runs any more: a step that has failed, or a process that has ended."""
        if self._lost is None and any(each.process.poll() is not None for each in self.members):
            return self._lose(PartedError("another rank has ended"))
        return self._lost

    def wait(self) -> None:
        """Wait until all have loaded their shards.

        Raises:
            ResourceError: one could not, or does not answer.
        """
        wait_for(self.members, Ready, LOADING_S)

    def look(self) -> None:
        """Look at those that load their shards.

        Raises:
            ResourceError: one could not.
        """
        look(self.members)

    def kill(self) -> None:
        """End them at once, whatever they do."""
        for member in self.members:
            member.process.kill()
        self.close()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for steps of the GPU in the body, of which none counts if another rank has ended.

        Raises:
            ResourceError: that is so.
        """
        with nullcontext() if self._watch is None else self._watch.waiting():
            yield
        self._check()

    def _check(self) -> None:
        if self._lost is None and self._watch is not None and self._watch.aborted:
            self._lose(PartedError("another rank does not answer"))
        if self._lost is not None:
            raise ResourceError(str(self._lost), self._lost.hint)

    def run(self, task: object, work: Callable[[], T]) -> T:
        """Have the others run a task, and do this rank's part of it; see `shared_decoder.Crew`."""
        job: Future[T] = Future()
        self._jobs.put((partial(self._together, task, work), job))
        stops = Stops()
        alive = self._worker.is_alive()  # not behind `close`, nor in a fork of this process
        while not futures.wait([job], LOOK_S if alive else 0).done:
            if not alive:
                raise self._gone()
            alive = self._worker.is_alive()
            if (member := stops.find(self.members, LOOK_S)) is not None:
                self._lose(silence(member, STOPPED_S))  # which ends the job
        return job.result()

    def _gone(self) -> ResourceError:
        """The error of a crew that is closed, or another process's."""
        if not self.close.alive:
            return ResourceError("the model is closed", hint="load it again")
        return ResourceError(
            "a fork of the process that has loaded the model cannot run it",
            hint="load the model in the process that runs it",
        )

    def _together(self, task: object, work: Callable[[], T]) -> T:
        self._check()
        try:
            content = encoded(task)
            for member in self.members:
                member.link.send_bytes(content)
            with self._mode():
                return work()
        except Exception as error:  # of any kind: the ranks are no longer in the same place
            raise self._lose(error) from error

    def _mode(self) -> AbstractContextManager[object]:
        """Inference mode on a CPU, as in `Engine`."""
        return torch.inference_mode() if self.peers is None else nullcontext()

    def _lose(self, error: Exception) -> LowbitError:
        """Keep the error that has ended all ranks, and end them."""
        with self._losing:
            if self._lost is None:
                # `close` may have come from another thread.
                self._lost = _reason(error, self.members) if self.close.alive else self._gone()
                for member in self.members:
                    member.process.kill()
            return self._lost


def load_shared(setup: Setup, shard: OpenedModel) -> "tuple[Crew, Decoder, Any]":
    """Load the shards of all ranks.

    Returns:
        The other ranks; the first one's shard as a decoder; the model as a drafter sees it, see
        `load_target`, or None without a drafter.

    Raises:
        LowbitError: a shard cannot be read, or a process has ended.
    """
    crew = start_crew(setup)
    try:
        decoder: Decoder

        def progress(module: str) -> None:
            crew.look()

        if crew.peers is None:
            sizes = setup.dtype, setup.cache.context
            model: Any = load_rank(shard, crew.exchange, *sizes, progress=progress)
            decoder = SharedDecoder(model, crew)
        else:
            lengths = setup.cache.context, MOST_CHUNK
            model = load_rank_on_gpu(shard, crew.peers, setup.dtype, *lengths, progress=progress)
            decoder = model
        target = None
        if shard.drafter is not None and shard.lone is not None:
            device = "cpu" if crew.peers is None else "cuda"
            target = load_target(model, shard.lone, device, setup.dtype)
        crew.wait()
    except BaseException:
        crew.kill()  # a rank that loads does not look at its socket
        raise
    return crew, decoder, target


def start_crew(setup: Setup) -> Crew:
    """Start the ranks behind the first one, and connect all; they go on to load their shards.

    setup: of the first rank.

    Raises:
        ResourceError: PyTorch lacks gloo, the processes have no place to meet, or one cannot be
            started or has ended.
    """
    check_gloo()
    members: list[Member] = []
    with _temporary() as folder:
        setup = replace(setup, store=Path(folder) / "store")
        try:
            for rank in range(1, setup.share.ranks):
                members.append(_start(replace(setup, share=Share(rank, setup.share.ranks))))
            wait_for(members, Arrived, START_S)
            exchange, peers = _met(setup, members)
        except BaseException:
            _end(members, patience_s=0.0)
            raise
    return Crew(members, exchange, setup.threads, peers)


def _met(setup: Setup, members: Sequence[Member]) -> "tuple[Exchange, Peers | None]":
    """The first rank's way to the others, which meet it, and that of its GPU.

    It is made in a thread that nobody waits for: calls of torch's cannot be interrupted, and go on
    for minutes where a process or the folder is gone.

    Raises:
        ResourceError: a rank has ended or does not come, or the folder is gone.
    """
    meeting: Future[tuple[Exchange, Peers | None]] = Future()

    def work() -> "tuple[Exchange, Peers | None]":
        exchange = meet(setup.share, setup.store, MEET_S, EXCHANGE_S)
        return exchange, meet_gpus(setup, exchange)

    threading.Thread(target=_do, args=(work, meeting), name="lowbit-meet", daemon=True).start()

    def done() -> bool:
        problem = meeting.exception() if meeting.done() else None
        if problem is None and meeting.done():
            return True
        if not setup.store.parent.exists():
            raise removed(setup.store.parent)
        if problem is None or isinstance(problem, PartedError):  # a member will be found to blame
            return meeting.done()
        raise problem

    wait_for(members, Met, MEET_S, done)
    return meeting.result()


@contextmanager
def _temporary() -> Iterator[str]:
    """A folder in which ranks meet.

    Raises:
        ResourceError: none can be made.
    """
    try:
        folder = TemporaryDirectory(prefix="lowbit-ranks-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ResourceError(
            f"no temporary folder in which processes meet: {error}",
            hint="name a folder that can be written in the environment variable TMPDIR",
        ) from error
    with folder as name:
        yield name


def _start(setup: Setup) -> Member:
    ours, theirs = socketpair()
    number = theirs.fileno()
    command = [sys.executable, "-P", "-m", MODULE, str(number), str(os.getpid())]
    try:
        with theirs, interrupts_blocked():
            process = subprocess.Popen(
                command, pass_fds=[number], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
    except OSError as error:
        ours.close()
        problem = f"no process of rank {setup.share.rank} could be started: {error}"
        raise ResourceError(problem, hint="end other processes, or run fewer") from error
    member = Member(setup.share.rank, process, Connection(ours.detach()))
    with suppress(OSError):  # it has ended; `wait_for` says how
        member.link.send_bytes(encoded(setup))
    return member


def _reason(error: Exception, members: Sequence[Member]) -> LowbitError:
    """The error that has ended all ranks: a member's, where this rank only noticed it."""
    if not isinstance(error, PartedError | OSError):
        own = explained(error)
        return own or LowbitError(f"a step of rank 0 failed: {type(error).__name__}: {error}")
    ready = wait([member.link for member in members], ENDING_S)
    ending = [member for member in members if member.link in ready]  # its link has a word, or none
    for member in ending:
        if isinstance(message := member.told(), Failed):
            return failure(member, message)
    # Others end when one has been killed.
    ended = sorted((each for each in ending if each.ending()), key=lambda each: not each.killed())
    if ended:
        return failure(ended[0], None)
    for member in members:
        if member.stopped:
            return silence(member, EXCHANGE_S)
    return ResourceError(f"a rank has not answered for {EXCHANGE_S:.0f} s", hint=AGAIN)


def _work(jobs: "SimpleQueue[Job | None]", threads: int) -> None:
    """Do this rank's parts of tasks, one after the other, in a thread of their own."""
    torch.set_num_threads(threads)
    while (job := jobs.get()) is not None:
        _do(*job)
        del job  # it holds the crew, which would never end


def _close(
    members: Sequence[Member],
    jobs: "SimpleQueue[Job | None]",
    owner: int,
    watch: Watch | None,
) -> None:
    """End a crew, and the watch over it; see `_end`."""
    # A fork has no such thread, but may have its lock.
    if watch is not None and owner == os.getpid():
        watch.closed.set()
    _end(members, jobs, owner)


def _do(work: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # whoever waits raises it
        future.set_exception(error)


def _end(
    members: Sequence[Member],
    jobs: "SimpleQueue[Job | None] | None" = None,
    owner: int | None = None,
    patience_s: float | None = None,
) -> None:
    """End all members, and wait for that.

    Args:
        owner: process whose members they are; a fork of it only lets go of them. None for this one.
        patience_s: time in which they may end by themselves; None for ENDING_S.
    """
    for member in members:
        member.link.close()
    if owner not in (None, os.getpid()):
        return
    if jobs is not None:
        jobs.put(None)
    deadline = time.monotonic() + (ENDING_S if patience_s is None else patience_s)
    try:
        for member in members:
            with suppress(subprocess.TimeoutExpired):
                member.process.wait(max(0.0, deadline - time.monotonic()))
    finally:  # another Ctrl-C leaves none, either
        for member in members:
            member.process.kill()
        for member in members:
            member.process.wait()
