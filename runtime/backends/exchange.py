"""Exchange of partial results among the ranks of a model: the one place where ranks meet in a step.

An op that ends a linear shared out by columns hands over its partial sums and gets their total; the
head hands over its columns of logits and gets all. Every rank gets the same bits.
"""

import ctypes
import os
import weakref
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from lowbit.formats.errors import ResourceError
from lowbit.runtime.weights.share import Share

LOOPBACK = "127.0.0.1"


class PartedError(ResourceError):
    """Another rank has ended, or does not answer."""


class Exchange(Protocol):
    """A rank's way to the others; all call the same methods in the same order."""

    @property
    def share(self) -> Share:
        """This rank among all."""

    def total(self, partial: Tensor) -> Tensor:
        """Sum of the partial sums of all ranks, float32, added in the order of the ranks."""

    def side_by_side(self, part: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Columns of all ranks, [M, sum of widths], in the order of the ranks.

        Args:
            part: [M, N] of this rank.
            widths: N of every rank.
        """


@dataclass(frozen=True, slots=True)
class GlooExchange:
    """Ranks as processes of one machine that talk over its loopback interface."""

    share: Share
    group: Any  # a `ProcessGroupGloo`, whose stubs lack its methods

    def total(self, partial: Tensor) -> Tensor:
        """Sum of the partial sums of all ranks; see `Exchange.total`."""
        first, *others = self._all(partial.contiguous())
        for other in others:
            first += other
        return first

    def side_by_side(self, part: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Columns of all ranks; see `Exchange.side_by_side`."""
        padded = part.new_zeros(len(part), max(widths))
        padded[:, : part.shape[1]] = part
        each = self._all(padded)
        return torch.cat([x[:, :width] for x, width in zip(each, widths, strict=True)], dim=1)

    def _all(self, own: Tensor) -> list[Tensor]:
        """Tensors of all ranks, of one shape."""
        found = [torch.empty_like(own) for _ in range(self.share.ranks)]
        try:
            self.group.allgather([found], [own]).wait()
        except RuntimeError as error:
            raise PartedError("another rank does not answer") from error
        return found


def check_gloo() -> None:
    """Refuse a PyTorch without the library that ranks talk by.

    Raises:
        ResourceError: it has none.
    """
    if not (distributed.is_available() and distributed.is_gloo_available()):
        raise ResourceError(
            "this PyTorch has no gloo, by which processes share a model",
            hint="install PyTorch from its wheels, or run one process",
        )


def meet(share: Share, store: Path, meet_s: float, exchange_s: float) -> GlooExchange:
    """Wait for all ranks, which have the same store, and connect them.

    Args:
        share: this rank.
        store: path of a file that all ranks can write, in a folder of theirs.
        meet_s: longest time that a rank waits for another here.
        exchange_s: the same in an exchange.

    Raises:
        PartedError: another rank has not come.
        ResourceError: the file cannot be written, or its folder is gone.
    """
    if not store.parent.exists():  # or the store would hold up all threads for minutes
        raise removed(store.parent)
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = timedelta(seconds=exchange_s)
    try:
        file = distributed.FileStore(str(store), share.ranks)  # type: ignore[attr-defined]
        file.set_timeout(timedelta(seconds=meet_s))
        group = gloo(file, share.rank, share.ranks, options)
        keep_in_forks(group)
        return GlooExchange(share, group)
    except distributed.DistStoreError as error:  # a wait that was too long is no such error
        raise ResourceError(
            f"`{store.parent}`, where processes meet, cannot be written: {error}",
            hint="free some space, or name another folder in the environment variable TMPDIR",
        ) from error
    except RuntimeError as error:
        raise PartedError("another rank has not come") from error


def removed(folder: Path) -> ResourceError:
    """The error of a folder that is gone before all ranks have met in it."""
    return ResourceError(
        f"the folder `{folder}`, in which processes meet, was removed",
        hint="load the model again; the environment variable TMPDIR names another folder",
    )


def keep_in_forks(group: Any) -> None:
    """Let no fork of this process end a group of ranks.

    It would wait for threads that it does not have, and take connections from the process that has.
    """
    found = weakref.ref(group)

    def keep() -> None:
        if (group := found()) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    os.register_at_fork(after_in_child=keep)
