"""Memory of the host for GPUs that do not reach each other's: each rank has a part that all write.

Every GPU of a machine can write and read page-locked memory of the host, over PCIe. So the kernels
of an exchange are the same; words only take longer.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.errors import ResourceError
from lowbit.runtime.backends.exchange import Exchange
from lowbit.runtime.backends.peers import new_peers
from lowbit.runtime.kernels.exchange import buffer_words
from lowbit.runtime.kernels.exchange_wide import wide_room
from lowbit.runtime.kernels.ptx.peers import Peers

MAPPED_FOR_ALL = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
HINT = "choose GPUs that reach each other's memory, or serve the same folder with vLLM"


class Locked:
    """Memory that is page-locked for all GPUs while this object is there."""

    def __init__(self, memory: Tensor) -> None:
        """Lock the memory.

        Raises:
            ResourceError: the driver refuses.
        """
        address, size = memory.data_ptr(), memory.numel() * memory.element_size()
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(driver.cudaHostRegister(address, size, MAPPED_FOR_ALL))
        if code != 0:
            raise ResourceError(
                f"{size / 1e6:.0f} MB of the host's memory cannot be locked for GPUs: CUDA error "
                f"{code}",
                hint=HINT,
            )
        self.memory = memory
        weakref.finalize(self, driver.cudaHostUnregister, address).atexit = False


def open_peers(exchange: Exchange, devices: Sequence[int], store: Path, wide_values: int) -> Peers:
    """This rank's part of memory that the first one makes; all ranks call it together.

    Args:
        exchange: see `symmetric.open_peers`, as the rest.
        devices: number of the GPU of each rank; this one's is current.
        store: path of a file that all ranks can write.
        wide_values: most numbers of a chunk of a prompt.

    Raises:
        ResourceError: the memory cannot be shared or locked.
        PartedError: another rank has not come.
    """
    share = exchange.share
    size = wide_room(share.ranks, wide_values, 8 * buffer_words(share.ranks)).size
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = torch.frombuffer(shared(exchange, store, size * share.ranks), dtype=torch.int64)
    locked = Locked(whole)
    exchange.total(torch.zeros(1))  # nobody pushes before all have it
    addresses = [whole.data_ptr() + rank * size for rank in range(share.ranks)]
    own = whole[share.rank * size // 8 : (share.rank + 1) * size // 8]
    device = torch.device("cuda", devices[share.rank])
    return new_peers(share, own, addresses, device, wide_values, locked)


def shared(exchange: Exchange, store: Path, size: int) -> mmap.mmap:
    """Bytes of zeros that the processes of all ranks see, and that no file keeps.

    Raises:
        ResourceError: the first rank's memory cannot be made or found.
        PartedError: another rank has not come.
    """
    try:
        if exchange.share.rank:
            exchange.total(torch.zeros(1))
            number = os.open(store.read_text(), os.O_RDWR)
        else:
            number = os.memfd_create("lowbit-ranks")
            os.ftruncate(number, size)
            store.write_text(f"/proc/{os.getpid()}/fd/{number}")
            exchange.total(torch.zeros(1))
        try:
            memory = mmap.mmap(number, size)
            exchange.total(torch.zeros(1))  # the first rank closes its own behind all others
        finally:
            os.close(number)
    except OSError as error:
        raise ResourceError(
            f"processes cannot share {size / 1e6:.0f} MB of the host's memory: {error}", hint=HINT
        ) from error
    return memory
