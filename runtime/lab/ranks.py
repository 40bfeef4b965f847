"""Memory of a model by rank, where several processes share it, from headers alone."""

from dataclasses import dataclass, replace

import torch

from lowbit.formats.architectures.footprint import kv_bytes, state_bytes
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.kv_cache import plain_cache
from lowbit.formats.machine.memory import free_bytes
from lowbit.runtime.engine.graphs import drafts_together
from lowbit.runtime.engine.load import check_device
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.memory import HEADROOM, Account, asked_cache
from lowbit.runtime.lab.expected import (
    DTYPE,
    open_drafter_headers,
    open_headers,
    vision_bytes,
)
from lowbit.runtime.models.loader import OpenedModel, without_head
from lowbit.runtime.models.shards import SAME_TOKENS, check_ranks, ranks_that_fit, shard_of
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.weights.share import Share

# Of a process, beside what `load` counts: 180 MB measured. What they take of a GPU is not free any
# more when that is asked.
LIBRARIES = {"cpu": 200 << 20, "cuda": 0}


@dataclass(frozen=True, slots=True)
class RankDemand:
    """Bytes of a rank, as `load` counts them, with its libraries."""

    rank: int
    weights: int
    cache: int  # keys and values of one sequence
    states: int  # recurrent states of one sequence
    # all else: libraries, sampler, snapshots of states, activations, graphs, the exchange
    buffers: int
    drafts: int = 0  # on rank 0 a drafter and what it needs; on all, states behind drafts

    @property
    def total(self) -> int:
        """All of its bytes."""
        return self.weights + self.cache + self.states + self.buffers + self.drafts


@dataclass(frozen=True, slots=True)
class SharedDemand:
    """A model that several ranks share."""

    ranks: tuple[RankDemand, ...]
    fitting: tuple[int, ...]  # numbers of ranks that divide its heads, widths and groups
    context: int  # tokens of the sequence
    fits: bool | None  # in free memory; None if the system does not tell, or has no such device
    tokens: str  # how they compare with those of one process
    refused: str | None  # why this device does not run it; None where it does
    # More bytes by rank if the head for multi-token prediction drafts; () without such a head
    head: tuple[int, ...]
    # Bytes of the vision tower's weights, which rank 0 alone reads for images and which no rank
    # counts; 0 without a tower
    vision: int


def shared_demand(name: str, device: str, ranks: int, drafter: str | None = None) -> SharedDemand:
    """Demand of a model by rank.

    Args:
        name: folder, config.json, or Hub id, whose headers are fetched.
        device: `cpu` or `cuda`.
        ranks: 2 or more.
        drafter: of the model, likewise; the model's own head does not draft then.

    Raises:
        RequestError: so many ranks cannot share it; the hint names numbers that can.
        LowbitError: no model, a damaged one, or one that cannot be served; no drafter, or one for
            another model.
    """
    opened, _ = open_headers(name, head=drafter is None)
    check_ranks(opened, ranks)
    plain = without_head(opened)
    accounts = [_account(plain, Share(rank, ranks), device) for rank in range(ranks)]
    size = asked_cache(accounts[0], LoadOptions(max_sequences=1), 0)
    each = [_demand(account, rank, size) for rank, account in enumerate(accounts)]
    head: tuple[int, ...] = ()
    if drafter is not None:
        beside = _drafting(open_drafter_headers(opened, drafter), ranks, device, size)
        parts = zip(each, beside, strict=True)
        each = [replace(rank, drafts=more - rank.total) for rank, more in parts]
    elif opened.head:
        found = zip(each, _drafting(opened, ranks, device, size), strict=True)
        head = tuple(more - rank.total for rank, more in found)
    there = device == "cpu" or torch.cuda.is_available()
    free, needed = free_bytes(device) if there else None, [rank.total for rank in each]
    most = sum(needed) if device == "cpu" else max(needed)
    return SharedDemand(
        ranks=tuple(each),
        fitting=ranks_that_fit(opened),
        context=size.context,
        fits=None if free is None else most <= free,
        tokens=SAME_TOKENS[device],
        refused=_refused(device, ranks),
        head=head,
        vision=vision_bytes(opened.checkpoint),
    )


def _account(opened: OpenedModel, share: Share, device: str) -> Account:
    """Memory of a rank; tokenizers are no part of headers, so that all rows count as tokens."""
    rows = opened.config.vocab_size
    return Account(
        shard_of(opened, share), device, DTYPE, plain_cache(DTYPE), rows, ranks=share.ranks
    )


def _demand(account: Account, rank: int, size: CacheSize) -> RankDemand:
    shard = account.opened
    weights = shard.weight_bytes(account.device, DTYPE)
    cache = kv_bytes(shard.config, size.context, DTYPE.itemsize)
    states = state_bytes(shard.config, DTYPE.itemsize)
    buffers = _whole(account, size) - weights - cache - states
    return RankDemand(rank, weights, cache, states, buffers)


def _whole(account: Account, size: CacheSize) -> int:
    """Bytes of a rank, its libraries included."""
    own = replace(account, ranks=1) if account.device == "cpu" else account
    return int(own.needed(size, size.all_pages) * HEADROOM) + LIBRARIES[account.device]


def _drafting(opened: OpenedModel, ranks: int, device: str, size: CacheSize) -> list[int]:
    """Bytes of each rank where the first one drafts: by its head, or by the drafter beside it."""
    options = LoadOptions(speculate="mtp")  # as many drafts as with a drafter
    most = options.most_drafts(recurrent=opened.config.linear_layers is not None)
    drafted = replace(size, drafts=drafts_together(most, size.sequences))
    return [_whole(_account(opened, Share(rank, ranks), device), drafted) for rank in range(ranks)]


def _refused(device: str, ranks: int) -> str | None:
    try:
        check_device(DTYPE, LoadOptions(tensor_parallel=ranks), device)
    except (RequestError, ResourceError) as error:
        return f"{error}; {error.hint}" if error.hint else str(error)
    return None
