"""The record by which the kernels of a rank reach the memory of all, wherever that is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.runtime.kernels.exchange import PROGRAMS, PUSHED_PROGRAMS, buffer_words
from lowbit.runtime.kernels.exchange_wide import PROGRAMS as WIDE_PROGRAMS
from lowbit.runtime.kernels.ptx.peers import Peers
from lowbit.runtime.weights.share import Share


def new_peers(
    share: Share,
    own: Tensor,
    addresses: Sequence[int],
    device: torch.device,
    wide_values: int,
    mapping: object,
) -> Peers:
    """A rank's peers, with nothing counted yet; see `Peers`."""

    def counters(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    return Peers(
        share,
        own=own,
        addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
        counters=counters(PROGRAMS),
        numbers=counters(PUSHED_PROGRAMS),
        aborted=torch.zeros(1, dtype=torch.int32, pin_memory=True),
        wide_start=8 * buffer_words(share.ranks),
        wide_values=wide_values,
        wide_counters=counters(WIDE_PROGRAMS),
        mapping=mapping,
    )
