"""Context and sequences that fit into the memory a device has left."""

from dataclasses import dataclass, replace

import torch

from lowbit.formats.architectures.footprint import DEFAULT_CONTEXT, state_bytes
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.kv_cache import CacheType
from lowbit.formats.machine.free_memory import free_bytes
from lowbit.runtime.engine.graphs import drafts_together
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.runner import new_kept
from lowbit.runtime.models.loader import OpenedModel
from lowbit.runtime.state.device_state import CacheSize, kv_pages, new_state
from lowbit.runtime.state.pages import EXTRA, PAGE, pages_for
from lowbit.runtime.state.round_inputs import new_trail
from lowbit.runtime.state.sampler import new_sampler_rows
from lowbit.runtime.state.snapshots import Snapshots

MIN_CONTEXT = 16  # below this nothing useful fits
HEADROOM = 1.05  # activations, tables and the allocator's slack, on top of weights and cache
# A prefill chunk's activations, graphs, the libraries' buffers. A chunk that is replayed has its
# activations in the graphs' pool, beside those of launched ones; but where chunks are replayed no
# weights are widened, which takes as much.
GPU_WORKSPACE = 256 << 20
SNAPSHOTS = 3  # on a CPU there is memory for so many and one more a sequence, beside the cache
SNAPSHOT_BYTES = 8 << 30  # most memory of the host for snapshots
SNAPSHOT_SHARE = 4  # of what is free there they take a fourth at most


@dataclass(frozen=True, slots=True)
class Account:
    """Memory that a model and the state of its sequences will take on a device.

    State is counted by making it without memory, by the functions that `new_runner` calls.

    Attributes:
        opened: the model.
        device: `cpu` or `cuda`.
        dtype: of activations and recurrent states.
        cache_type: of keys and values.
        vocabulary: real tokens.
    """

    opened: OpenedModel
    device: str
    dtype: torch.dtype
    cache_type: CacheType
    vocabulary: int

    def page_bytes(self, count: int) -> int:
        """Memory of so many pages, a drafter's included."""
        opened = self.opened
        pages = kv_pages(opened.config, count, self.cache_type, "meta", opened.head).size_bytes
        if opened.drafter is not None:
            pages += kv_pages(opened.drafter.config, count, self.cache_type, "meta").size_bytes
        return pages

    def row_bytes(self, size: CacheSize) -> int:
        """Memory of the sequences of a cache, whatever their length: states, sampler, logits.

        Snapshots are counted on a CPU alone; a GPU has the buffers that they pass through.
        """
        config, rows, on_gpu = self.opened.config, size.rows, self.device != "cpu"
        state = new_state(config, 0, size.slots, self.dtype, "meta")
        snapshots = Snapshots(state.slots, size.snapshots, staged=on_gpu)
        taken = state.size_bytes + (snapshots.staged_bytes if on_gpu else snapshots.most_bytes)
        taken += new_sampler_rows(rows, self.vocabulary, "meta").size_bytes
        if self.opened.head:
            taken += new_trail(rows, config.hidden_size, self.dtype, "meta").nbytes
        if on_gpu:  # a CPU keeps no copy of logits
            kept = new_kept(size.sequences, self.vocabulary, config.vocab_size, "meta")
            taken += kept.nbytes
        return taken

    def needed(self, size: CacheSize, pages: int) -> int:
        """Memory of weights, sequences and so many pages, without HEADROOM."""
        workspace = 0 if self.device == "cpu" else GPU_WORKSPACE
        weights = self.opened.weight_bytes(self.device, self.dtype)
        return weights + workspace + self.row_bytes(size) + self.page_bytes(pages)

    def snapshots_that_fit(self, size: CacheSize, free: int) -> int:
        """Snapshots in what a CPU has left beside a cache, or in memory of a GPU's host.

        Args:
            size: of the cache, with the snapshots that are counted.
            free: memory of the device before anything is loaded.
        """
        each = state_bytes(self.opened.config, self.dtype.itemsize)
        if self.device != "cpu":
            return snapshots_for(size.pages, each, free_bytes("cpu"))
        left = int(free / HEADROOM) - self.needed(size, size.all_pages)
        return max(size.snapshots, snapshots_for(size.pages, each, left))

    def pages_that_fit(self, size: CacheSize, free: int) -> int:
        """Pages for tokens that fit into free memory beside weights and sequences."""
        each = max(1, self.page_bytes(1))  # 0 where every layer is linear
        return int((free / HEADROOM - self.needed(size, 0)) // each) - EXTRA


def choose_cache(account: Account, options: LoadOptions, drafts: int = 0) -> CacheSize:
    """Sizes of the cache, after checking that it fits into free memory beside the weights.

    Args:
        account: of the model.
        options: context, sequences and tokens of the cache that are asked for.
        drafts: of a sequence in one step at most.

    Raises:
        RequestError: a context that the model has no positions for, or fewer tokens than the
            context.
        ResourceError: weights, or weights and cache, do not fit.
    """
    context, sequences, tokens = options.context, options.max_sequences, options.cache_tokens
    limit = account.opened.config.max_position_embeddings
    if context is not None and not 1 <= context <= limit:
        raise RequestError(f"context {context}: the model has positions for 1 to {limit} tokens")
    wanted = context or min(limit, DEFAULT_CONTEXT)
    if tokens is not None and tokens < wanted:
        raise RequestError(f"a cache of {tokens} tokens is smaller than the context of {wanted}")
    asked = CacheSize(
        context=wanted,
        sequences=sequences,
        pages=pages_for(tokens) if tokens else sequences * pages_for(wanted),
        snapshots=SNAPSHOTS + sequences,
        drafts=drafts_together(drafts, sequences),
    )
    free = free_bytes(account.device)
    if free is None:
        return asked
    fits = account.pages_that_fit(asked, free)
    if fits >= pages_for(wanted) and (tokens is None or fits >= asked.pages):
        size = replace(asked, pages=min(fits, asked.pages))
    elif context is None and tokens is None and fits * PAGE >= MIN_CONTEXT:
        size = replace(asked, context=fits * PAGE, pages=fits)
    else:
        if tokens is None:
            asked = replace(asked, pages=pages_for(wanted))
        raise _too_large(account, asked, free, None if tokens is None else wanted)
    return replace(size, snapshots=account.snapshots_that_fit(size, free))


def _too_large(account: Account, size: CacheSize, free: int, least: int | None) -> ResourceError:
    """The error of a cache that does not fit; its hint names a size that does.

    least: tokens of a cache whose size has been asked for; None where only the context has.
    """
    need = int(account.needed(size, size.all_pages) * HEADROOM)
    fits = account.pages_that_fit(size, free) * PAGE
    one = replace(size, sequences=1, snapshots=SNAPSHOTS + 1)
    alone = account.pages_that_fit(one, free) * PAGE
    limit = account.opened.config.max_position_embeddings
    if least is not None and fits >= least:
        hint = f"a cache of {fits} tokens fits"
    elif fits >= MIN_CONTEXT:
        hint = f"--context {min(fits, limit)} fits"
    elif alone >= MIN_CONTEXT:
        hint = f"one sequence with --context {min(alone, limit)} fits"
    else:
        hint = "the weights alone do not fit"
    return ResourceError(
        f"needs {gigabytes(need)} for weights and a cache of {size.pages * PAGE} tokens for "
        f"{size.sequences} sequence{'s' if size.sequences > 1 else ''}, free on {account.device}: "
        f"{gigabytes(free)}",
        hint=hint,
    )


def snapshots_for(pages: int, each: int, left: int | None) -> int:
    """Most snapshots of recurrent states to keep on the host.

    Args:
        pages: of the cache; snapshots are about as far apart as the tokens of one.
        each: bytes of a snapshot; 0 without linear layers.
        left: free memory of the host; None if the system does not tell.
    """
    share = SNAPSHOT_BYTES if left is None else min(SNAPSHOT_BYTES, left // SNAPSHOT_SHARE)
    return min(pages, max(0, share) // each) if each else 0


def gigabytes(size_bytes: int) -> str:
    """`1.23 GB`, in units of 1e9 bytes; small sizes in MB."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"
