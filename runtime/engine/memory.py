"""Context and sequences that fit into the memory a device has left."""

from dataclasses import dataclass

import torch

from lowbit.formats.architectures.footprint import DEFAULT_CONTEXT, SNAPSHOTS, state_count
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.machine.free_memory import free_bytes
from lowbit.runtime.engine.graphs import drafts_together
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.models.loader import OpenedModel
from lowbit.runtime.state.pages import EXTRA, PAGE, pages_for

MIN_CONTEXT = 16  # below this nothing useful fits
HEADROOM = 1.05  # activations, tables and the allocator's slack, on top of weights and cache
GPU_WORKSPACE = 256 << 20  # a prefill chunk's activations, graphs, the libraries' buffers


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of the cache.

    Attributes:
        context: most tokens of a sequence.
        sequences: that are decoded together.
        pages: for the keys and values of all of them and of prefixes to reuse.
        snapshots: recurrent states beside one for each sequence.
        drafts: most of one step, and so the number of spare recurrent states.
    """

    context: int
    sequences: int
    pages: int
    snapshots: int
    drafts: int = 0


def choose_cache(
    opened: OpenedModel, device: str, dtype: torch.dtype, options: LoadOptions, drafts: int = 0
) -> CacheSize:
    """Sizes of the cache, after checking that it fits into free memory beside the weights.

    Args:
        opened: the model.
        device: `cpu` or `cuda`.
        dtype: of keys and values.
        options: context, sequences and tokens of the cache that are asked for.
        drafts: of a sequence in one step at most.

    Raises:
        RequestError: a context that the model has no positions for, or fewer tokens than the
            context.
        ResourceError: weights, or weights and cache, do not fit.
    """
    context, sequences, tokens = options.context, options.max_sequences, options.cache_tokens
    limit = opened.config.max_position_embeddings
    if context is not None and not 1 <= context <= limit:
        raise RequestError(f"context {context}: the model has positions for 1 to {limit} tokens")
    wanted = context or min(limit, DEFAULT_CONTEXT)
    if tokens is not None and tokens < wanted:
        raise RequestError(f"a cache of {tokens} tokens is smaller than the context of {wanted}")
    drafts = drafts_together(drafts, sequences)
    all_pages = pages_for(tokens) if tokens else sequences * pages_for(wanted)
    free = free_bytes(device)
    if free is None:
        return _sized(wanted, sequences, all_pages, drafts)
    fits = pages_that_fit(opened, device, dtype, sequences, free, drafts)
    if fits >= pages_for(wanted) and (tokens is None or fits >= all_pages):
        return _sized(wanted, sequences, min(fits, all_pages), drafts)
    if context is None and tokens is None and fits * PAGE >= MIN_CONTEXT:
        return _sized(fits * PAGE, sequences, fits, drafts)
    pages = all_pages if tokens else pages_for(wanted)
    least = wanted if tokens else None
    raise _too_large(opened, device, dtype, sequences, pages, free, drafts, least)


def pages_that_fit(
    opened: OpenedModel, device: str, dtype: torch.dtype, sequences: int, free: int, drafts: int = 0
) -> int:
    """Pages that fit into free memory beside the weights and the states of so many sequences."""
    each = max(1, opened.kv_bytes(PAGE, dtype))  # 0 where every layer is linear
    left = free / HEADROOM - _fixed_bytes(opened, device, dtype, sequences, drafts)
    return int(left // each) - EXTRA


def cache_bytes(opened: OpenedModel, dtype: torch.dtype, size: CacheSize) -> int:
    """Memory of all pages and states."""
    pages = opened.kv_bytes((EXTRA + size.pages) * PAGE, dtype)
    return pages + (1 + size.sequences + size.snapshots + size.drafts) * opened.state_bytes(dtype)


def _sized(context: int, sequences: int, pages: int, drafts: int) -> CacheSize:
    return CacheSize(context, sequences, pages, SNAPSHOTS + sequences, drafts)


def _fixed_bytes(
    opened: OpenedModel, device: str, dtype: torch.dtype, sequences: int, drafts: int
) -> int:
    """Memory that does not grow with the context."""
    workspace = 0 if device == "cpu" else GPU_WORKSPACE
    return (
        opened.weight_bytes(device, dtype)
        + (state_count(sequences) + drafts) * opened.state_bytes(dtype)
        + workspace
    )


def _too_large(
    opened: OpenedModel,
    device: str,
    dtype: torch.dtype,
    sequences: int,
    pages: int,
    free: int,
    drafts: int,
    least: int | None,
) -> ResourceError:
    """The error of a cache that does not fit; its hint names a size that does.

    least: tokens of a cache whose size has been asked for; None where only the context has.
    """
    fixed = _fixed_bytes(opened, device, dtype, sequences, drafts)
    need = int((fixed + opened.kv_bytes((EXTRA + pages) * PAGE, dtype)) * HEADROOM)
    fits = pages_that_fit(opened, device, dtype, sequences, free, drafts) * PAGE
    alone = pages_that_fit(opened, device, dtype, 1, free, drafts) * PAGE
    limit = opened.config.max_position_embeddings
    if least is not None and fits >= least:
        hint = f"a cache of {fits} tokens fits"
    elif fits >= MIN_CONTEXT:
        hint = f"--context {min(fits, limit)} fits"
    elif alone >= MIN_CONTEXT:
        hint = f"one sequence with --context {min(alone, limit)} fits"
    else:
        hint = "the weights alone do not fit"
    return ResourceError(
        f"needs {gigabytes(need)} for weights and a cache of {pages * PAGE} tokens for "
        f"{sequences} sequence{'s' if sequences > 1 else ''}, free on {device}: {gigabytes(free)}",
        hint=hint,
    )


def gigabytes(size_bytes: int) -> str:
    """`1.23 GB`, in units of 1e9 bytes; small sizes in MB."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"
