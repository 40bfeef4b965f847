"""A runner with room for a cache of a size."""

import torch

from lowbit.runtime.backends.cpu_linear import CpuLinear
from lowbit.runtime.engine.blocks import Blocks
from lowbit.runtime.engine.memory import CacheSize
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.models.architectures import BlockDrafter
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.links import TRAIL
from lowbit.runtime.state.pages import EXTRA, pages_for
from lowbit.runtime.state.sampler_rows import new_sampler_rows


def new_runner(
    decoder: Decoder,
    vocabulary: int,
    cache: CacheSize,
    dtype: torch.dtype,
    device: str,
    drafter: BlockDrafter[CpuLinear] | None = None,
) -> Runner:
    """A runner with empty pages and slots.

    Args:
        decoder: the model.
        vocabulary: real tokens; ids from here on are padding and never chosen.
        cache: what to make room for.
        dtype: of keys and values.
        device: `cpu` or `cuda`.
        drafter: beside the model, on a CPU.
    """
    rows = 1 + cache.sequences
    kept = rows + cache.snapshots
    slots = kept + cache.drafts
    state = decoder.new_state(EXTRA + cache.pages, slots, dtype, device)
    trail = None
    if decoder.mtp is not None:
        trail = torch.zeros(rows, TRAIL, decoder.config.hidden_size, dtype=dtype, device=device)
    tables = torch.zeros(rows, pages_for(cache.context), dtype=torch.int32, device=device)
    sampler = new_sampler_rows(rows, vocabulary, device)
    blocks = None
    if drafter is not None:
        beside = drafter.new_pages(EXTRA + cache.pages, dtype, device)
        blocks = Blocks(drafter, beside, tables, sampler)
    return Runner(
        decoder=decoder,
        state=state,
        sampler=sampler,
        context=cache.context,
        snapshots=cache.snapshots,
        spare=range(kept, slots) if state.recurrent else None,
        tables=tables,
        trail=trail,
        blocks=blocks,
    )
