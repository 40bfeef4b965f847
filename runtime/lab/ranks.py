"""Memory of a model by rank, where several processes share it, from headers alone."""

from dataclasses import dataclass

from lowbit.formats.architectures.footprint import DEFAULT_CONTEXT, kv_bytes, state_bytes
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.machine.memory import free_bytes
from lowbit.runtime.engine.load import check_device
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.lab.expected import DTYPE, WORKSPACE, open_headers
from lowbit.runtime.models.loader import OpenedModel
from lowbit.runtime.models.shards import SAME_TOKENS, check_ranks, ranks_that_fit, shard_of
from lowbit.runtime.weights.share import Share


@dataclass(frozen=True, slots=True)
class RankDemand:
    """Bytes of a rank."""

    rank: int
    weights: int
    cache: int  # keys and values of one sequence
    states: int  # recurrent states of one sequence
    buffers: int  # libraries, activations, what ranks exchange

    @property
    def total(self) -> int:
        """All of its bytes."""
        return self.weights + self.cache + self.states + self.buffers


@dataclass(frozen=True, slots=True)
class SharedDemand:
    """A model that several ranks share."""

    ranks: tuple[RankDemand, ...]
    fitting: tuple[int, ...]  # numbers of ranks that divide its heads, widths and groups
    context: int  # tokens of the sequence
    fits: bool | None  # in free memory; None if the system does not tell
    tokens: str  # how they compare with those of one process
    refused: str | None  # why this device does not run it; None where it does


def shared_demand(name: str, device: str, ranks: int) -> SharedDemand:
    """Demand of a model by rank.

    Args:
        name: folder, config.json, or Hub id, whose headers are fetched.
        device: `cpu` or `cuda`.
        ranks: 2 or more.

    Raises:
        RequestError: so many ranks cannot share it; the hint names numbers that can.
        LowbitError: no model, a damaged one, or one that cannot be served.
    """
    opened, _ = open_headers(name)
    check_ranks(opened, ranks)
    context = min(DEFAULT_CONTEXT, opened.config.max_position_embeddings)
    each = tuple(_demand(opened, Share(rank, ranks), device, context) for rank in range(ranks))
    free, needed = free_bytes(device), [rank.total for rank in each]
    most = sum(needed) if device == "cpu" else max(needed)
    return SharedDemand(
        ranks=each,
        fitting=ranks_that_fit(opened),
        context=context,
        fits=None if free is None else most <= free,
        tokens=SAME_TOKENS[device],
        refused=_refused(device, ranks),
    )


def _demand(opened: OpenedModel, share: Share, device: str, context: int) -> RankDemand:
    shard = shard_of(opened, share)
    return RankDemand(
        rank=share.rank,
        weights=shard.weight_bytes(device, DTYPE),
        cache=kv_bytes(shard.config, context, DTYPE.itemsize),
        states=state_bytes(shard.config, DTYPE.itemsize),
        buffers=WORKSPACE[device],
    )


def _refused(device: str, ranks: int) -> str | None:
    try:
        check_device(DTYPE, LoadOptions(tensor_parallel=ranks), device)
    except (RequestError, ResourceError) as error:
        return f"{error}; {error.hint}" if error.hint else str(error)
    return None
