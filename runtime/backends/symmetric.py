"""Symmetric memory of the GPUs that share a model: each rank has a buffer that all can write."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count, permutations
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import Store, _SymmetricMemory
from torch.distributed import _symmetric_memory as symmetric

from lowbit.formats.errors import ResourceError
from lowbit.runtime.backends.exchange import Exchange, PartedError, keep_in_forks
from lowbit.runtime.backends.peers import new_peers
from lowbit.runtime.kernels.exchange import buffer_words
from lowbit.runtime.kernels.exchange_wide import wide_room
from lowbit.runtime.kernels.ptx.peers import Peers
from lowbit.runtime.weights.share import Share

# Multicast of NVLink is not used, and can take GPUs out of service where it is set up.
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
SAME_DEVICE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # several ranks on one GPU, for tests
LOOPBACK = "GLOO_SOCKET_IFNAME"  # where processes of one machine talk, whatever its name
BACKEND = "cpu:gloo"
JOINED = count()  # groups of this process so far, to whose buffers PyTorch goes on to give numbers
NUMBERED = re.compile(r"(?<=CUDASymmetricMemory/)\d+")  # in keys by which PyTorch exchanges buffers


class CountedFromZero(Store):
    """A store in which PyTorch numbers its exchanges of buffers from 0 on.

    It counts them for a whole process, from one group to the next. Where the first rank loads
    another model, the other ranks are new processes, which begin at 0: each would wait for keys
    that the other does not write.
    """

    def __init__(self, store: Any) -> None:
        """Keep everything in another store."""
        super().__init__()
        self._store = store
        self._first: int | None = None  # number of the first exchange

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value under a key."""
        self._store.set(self._counted(key), value)

    def get(self, key: str) -> bytes:
        """Value of a key, once it is there."""
        found: bytes = self._store.get(self._counted(key))
        return found

    def add(self, key: str, value: int) -> int:
        """Add to the number under a key."""
        found: int = self._store.add(self._counted(key), value)
        return found

    def check(self, keys: list[str]) -> bool:
        """True if all keys are there."""
        found: bool = self._store.check([self._counted(key) for key in keys])
        return found

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """Wait until all keys are there."""
        self._store.wait([self._counted(key) for key in keys], *timeout)

    def _counted(self, key: str) -> str:
        return NUMBERED.sub(self._from_zero, key)

    def _from_zero(self, number: "re.Match[str]") -> str:
        if self._first is None:
            self._first = int(number[0])
        return str(int(number[0]) - self._first)


def check_devices(devices: Sequence[int]) -> None:
    """Refuse GPUs that are not there, or of different kinds.

    devices: number of the GPU of each rank.

    Raises:
        ResourceError: naming them.
    """
    found = torch.cuda.device_count()
    if (most := max(devices)) >= found:
        raise ResourceError(
            f"{len(devices)} processes need as many GPUs, up to number {most}; "
            f"{found} {'is' if found == 1 else 'are'} visible",
            hint="run fewer, or look at CUDA_VISIBLE_DEVICES",
        )
    kinds = {torch.cuda.get_device_capability(each) for each in set(devices)}
    if len(kinds) > 1:
        names = sorted({torch.cuda.get_device_name(each) for each in set(devices)})
        raise ResourceError(
            f"GPUs of different kinds do not share a model yet: {', '.join(names)}",
            hint="choose some of one kind in the environment variable CUDA_VISIBLE_DEVICES",
        )


def reach_each_other(devices: Sequence[int]) -> bool:
    """True if every GPU can write the memory of all others; else there is `host_memory`.

    devices: number of the GPU of each rank.
    """
    pairs = permutations(set(devices), 2)
    return all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)


def open_peers(
    exchange: Exchange, devices: Sequence[int], store: Path, meet_s: float, wide_values: int
) -> Peers:
    """This rank's buffer, and the others' as its GPU sees them; all ranks call it together.

    PyTorch exchanges the buffers among the processes of its default group, which is made for that
    and given back.

    Args:
        exchange: by which ranks, which have met, wait for each other.
        devices: number of the GPU of each rank; this one's is current.
        store: path of a file that all ranks can write, in a folder of theirs.
        meet_s: longest time that a rank waits for another.
        wide_values: most numbers of a chunk of a prompt, see `exchange_wide`.

    Raises:
        ResourceError: this process has a group of its own, or memory cannot be shared.
        PartedError: another rank has not come.
    """
    if distributed.is_initialized():
        raise ResourceError(
            "this process has a process group of `torch.distributed`, beside which a model cannot "
            "be shared among GPUs",
            hint="load the model before the group is made, or in a process of its own",
        )
    share = exchange.share
    device = torch.device("cuda", devices[share.rank])
    room = wide_room(share.ranks, wide_values, 8 * buffer_words(share.ranks))
    settings = {NO_MULTICAST: "1", LOOPBACK: "lo"}
    if len(set(devices)) < len(devices):
        settings[SAME_DEVICE] = "1"
    with _settings(settings):
        try:
            with _joined(share, store, meet_s):
                # `symmetric.empty` takes from a pool, in which a tensor has no address of its own.
                size = (room.size // 8,)
                own = _SymmetricMemory.empty_strided_p2p(size, (1,), torch.int64, device)
                own.zero_()
                torch.cuda.synchronize(device)  # before another rank has the address
                group: Any = distributed.group.WORLD
                keep_in_forks(group)
                handle: Any = symmetric.rendezvous(own, group)
                pointers = list(handle.buffer_ptrs)
                exchange.total(torch.zeros(1))  # nobody leaves before all are done
        except distributed.DistStoreError as error:
            raise PartedError("another rank has not come") from error
        except RuntimeError as error:
            raise ResourceError(
                f"the memory of GPUs cannot be shared among processes: {_first_line(error)}",
                hint="serve the same folder with vLLM",
            ) from error
    return new_peers(share, own, pointers, device, wide_values, handle)


@contextmanager
def _joined(share: Share, path: Path, meet_s: float) -> Iterator[Store]:
    """Have a default group in the body, which is given its store.

    What Python adds to a store lives in the object alone, which C++ does not keep: so it is kept
    here.
    """
    file = distributed.FileStore(str(path), share.ranks)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=meet_s)
    file.set_timeout(timeout)
    store: Store = file
    if next(JOINED) > 0:
        store = CountedFromZero(file)
        store.set_timeout(timeout)
    try:
        distributed.init_process_group(
            BACKEND, store=store, rank=share.rank, world_size=share.ranks, timeout=timeout
        )
        yield store
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


@contextmanager
def _settings(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of PyTorch, and back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", maxsplit=1)[0]
