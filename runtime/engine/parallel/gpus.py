"""Ranks on GPUs: how they meet, and what ends the wait of a kernel for a rank that is gone."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.runtime.backends.exchange import Exchange
from lowbit.runtime.engine.parallel.members import Member, Stops
from lowbit.runtime.engine.parallel.messages import EXCHANGE_S, LOOK_S, MEET_S, Setup

if TYPE_CHECKING:
    from lowbit.runtime.kernels.ptx.peers import Peers


def meet_gpus(setup: Setup, exchange: Exchange) -> "Peers | None":
    """Share memory among the GPUs of ranks that have met; None on a CPU.

    This rank's GPU becomes the current one of the thread.

    Raises:
        ResourceError: it cannot be shared.
        PartedError: another rank has not come.
    """
    if not setup.devices:
        return None
    from lowbit.runtime.backends import host_memory, symmetric  # need triton and a GPU

    torch.cuda.set_device(setup.devices[setup.share.rank])
    store = setup.store.with_name("buffers")
    if setup.through_host:
        return host_memory.open_peers(exchange, setup.devices, store, setup.wide_values)
    return symmetric.open_peers(exchange, setup.devices, store, MEET_S, setup.wide_values)


class Watch:
    """Lets kernels go on that wait for a rank which has ended, is stopped or stays away too long.

    Nothing that they leave counts then. A GPU cannot be interrupted otherwise.

    Attributes:
        closed: set once nobody needs the watch any more.
        thread: that watches.
    """

    def __init__(self, members: Sequence[Member], aborted: Tensor) -> None:
        """Begin to watch.

        Args:
            members: the other ranks.
            aborted: see `Peers`.
        """
        self.closed = threading.Event()
        self._members, self._aborted = members, aborted
        self._since: float | None = None  # the host waits for the GPU
        self.thread = threading.Thread(target=self._run, name="lowbit-watch", daemon=True)
        self.thread.start()

    @property
    def aborted(self) -> bool:
        """True once kernels no longer wait."""
        return bool(self._aborted.any())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for the GPU in the body, for EXCHANGE_S at most."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def _run(self) -> None:
        stops = Stops()
        while not self.closed.wait(LOOK_S):
            since, members = self._since, self._members
            late = since is not None and (
                time.monotonic() - since > EXCHANGE_S or stops.find(members, LOOK_S) is not None
            )
            if late or any(member.process.poll() is not None for member in members):
                self._aborted.fill_(1)
                return
