"""A runner for a model that has been read: empty pages, slots and rows for a cache's sequences."""

import torch

from lowbit.formats.kv_cache import CacheType, plain_cache
from lowbit.formats.page_counts import pages_for
from lowbit.runtime.engine.plan import CHUNK
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.decode_inputs import new_hidden_ring
from lowbit.runtime.state.device_state import CacheSize, head_pages, new_state
from lowbit.runtime.state.sampler import new_sampler_rows
from lowbit.runtime.state.snapshots import Snapshots
from lowbit.runtime.thresholds import EXACT_TOKENS


def new_runner(
    decoder: Decoder,
    vocabulary: int,
    cache: CacheSize,
    dtype: torch.dtype,
    device: str,
    cache_type: CacheType | None = None,
    chunk_tokens: int = CHUNK,
    part_tokens: int = EXACT_TOKENS,
) -> Runner:
    """A runner with empty pages and slots.

    Args:
        vocabulary: real tokens; ids from here on are padding and never chosen.
        dtype: of activations and recurrent states.
        part_tokens: see `OpenedModel.part_tokens`.
    """
    cache_type = cache_type or plain_cache(dtype)
    rows, config, mtp = cache.rows, decoder.config, decoder.mtp
    lone = mtp is not None and mtp.lone
    head = mtp is not None and not lone
    state = new_state(config, cache.all_pages, cache.slots, dtype, device, cache_type, head)
    pages = None
    if mtp is not None and lone:
        pages = head_pages(mtp.trunk.config, cache.all_pages, cache_type, device)
    hidden_ring = None if mtp is None else new_hidden_ring(rows, config.hidden_size, dtype, device)
    tables = torch.zeros(rows, pages_for(cache.context), dtype=torch.int32, device=device)
    sampler = new_sampler_rows(rows, vocabulary, device)
    return Runner(
        decoder=decoder,
        state=state,
        sampler=sampler,
        context=cache.context,
        snapshots=Snapshots(state.slots, cache.snapshots, staged=device != "cpu"),
        spare=range(cache.slots - cache.drafts, cache.slots) if state.recurrent else None,
        tables=tables,
        hidden_ring=hidden_ring,
        head_pages=pages,
        chunk_tokens=chunk_tokens,
        part_tokens=part_tokens,
    )
