"""Context and sequences that fit into the memory a device has left."""

from bisect import bisect_left
from dataclasses import dataclass, replace

import torch

from lowbit.formats.architectures.footprint import DEFAULT_CONTEXT, state_bytes
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.kv_cache import INT8_CACHE, CacheType, plain_cache
from lowbit.formats.machine.memory import free_bytes
from lowbit.formats.page_counts import EXTRA, PAGE, pages_for
from lowbit.formats.sequence_counts import CHOSEN_SEQUENCES
from lowbit.runtime.engine.graphs import STEP_WIDTHS, drafts_together, kv_lens, width_for
from lowbit.runtime.engine.kept_logits import new_kept
from lowbit.runtime.engine.load_options import ANSWER_LENGTH, SEQUENCES, LoadOptions
from lowbit.runtime.engine.plan import MOST_CHUNK
from lowbit.runtime.models.loader import OpenedModel
from lowbit.runtime.state.decode_inputs import new_hidden_ring
from lowbit.runtime.state.device_state import CacheSize, head_pages, kv_pages, new_state
from lowbit.runtime.state.sampler import new_sampler_rows
from lowbit.runtime.state.snapshots import Snapshots
from lowbit.runtime.thresholds import EXACT_TOKENS, PACK_SEQUENCES

MIN_CONTEXT = 16  # below this nothing useful fits
SHORTER = 16  # further sequences may take one part of so many of a context that is short anyway
HEADROOM = 1.05  # activations, tables and the allocator's slack, on top of weights and cache
# A prefill chunk's activations, graphs, the libraries' buffers. A long chunk that is replayed has
# its activations in the graphs' pool, beside those of launched ones; but where such chunks are
# replayed no weights are widened, which takes as much.
GPU_WORKSPACE = 256 << 20
# Beside it on each of several GPUs: buffers of the exchange, and widened weights of partial sums of
# prompts, in the pool of graphs and outside.
SHARED_WORKSPACE = 256 << 20
# An estimate of the driver's memory for the graph of a part of a step, some hundred kernels. The
# workspace has room for graphs of steps of one part; those of larger ones are counted beside it.
GRAPH_BYTES = 8 << 20
# On a GPU the cache of one such sequence is a large part of what a step reads; a CPU gains nothing.
LONG_CONTEXT = DEFAULT_CONTEXT + 1
SNAPSHOTS = 3  # on a CPU there is memory for so many and one more a sequence, beside the cache
SNAPSHOT_BYTES = 8 << 30  # most memory of the host for snapshots
SNAPSHOT_SHARE = 4  # of what is free there they take a fourth at most


@dataclass(frozen=True, slots=True)
class Account:
    """Memory that a model and the state of its sequences will take on a device.

    State is counted by making it without memory, by the functions that `new_runner` calls.
    """

    opened: OpenedModel  # the model
    device: str  # `cpu` or `cuda`
    dtype: torch.dtype  # of activations and recurrent states
    cache_type: CacheType  # of keys and values
    vocabulary: int  # real tokens
    # Tokens of the cache that `kv_cache` auto keeps activations as they are for; None for all that
    # the options ask for
    auto_tokens: int | None = None
    ranks: int = 1  # processes like this one, which share the memory of a CPU
    vision_bytes: int = 0  # kept free for the vision tower and an image

    @property
    def processes(self) -> int:
        """Processes whose memory is that of the device."""
        return self.ranks if self.device == "cpu" else 1

    @property
    def follower(self) -> "Account":
        """Memory of a rank other than the first, which drafts nothing and has no vision tower."""
        return replace(self, opened=replace(self.opened, drafter=None, lone=None), vision_bytes=0)

    def page_bytes(self, count: int) -> int:
        """Memory of so many pages, a drafter's included, which the first rank alone has."""
        opened, drafting = self.opened, 0
        pages = kv_pages(opened.config, count, self.cache_type, "meta", opened.head).size_bytes
        if opened.drafter is not None:
            drafting += kv_pages(opened.drafter.config, count, self.cache_type, "meta").size_bytes
        if (mtp := opened.lone_mtp) is not None:
            drafting += head_pages(mtp.config, count, self.cache_type, "meta").size_bytes
        return pages * self.processes + drafting

    def row_bytes(self, size: CacheSize) -> int:
        """Memory of the sequences of a cache, whatever their length: states, sampler, logits.

        Snapshots are counted on a CPU alone; a GPU has the buffers that they pass through.
        """
        config, rows, on_gpu = self.opened.config, size.rows, self.device != "cpu"
        state = new_state(config, 0, size.slots, self.dtype, "meta")
        snapshots = Snapshots(state.slots, size.snapshots, staged=on_gpu)
        taken = state.size_bytes + (snapshots.staged_bytes if on_gpu else snapshots.most_bytes)
        taken += new_sampler_rows(rows, self.vocabulary, "meta").size_bytes
        ring = new_hidden_ring(rows, config.hidden_size, self.dtype, "meta").nbytes
        drafting = ring * (self.opened.drafts + self._keeps_context)  # of the first rank alone
        if on_gpu:  # a CPU keeps no copy of logits
            kept = new_kept(size.sequences, self.vocabulary, config.vocab_size, "meta")
            taken += kept.nbytes
        return taken * self.processes + drafting

    @property
    def _keeps_context(self) -> bool:
        """True if a drafter's head reads the context of a position, see `Blocks.contexts`."""
        blocks = None if self.opened.drafter is None else self.opened.drafter.config.block_drafts
        return blocks is not None and blocks.keeps_context

    def graph_bytes(self, size: CacheSize) -> int:
        """Memory on a GPU of the graphs of steps of more than EXACT_TOKENS sequences."""
        widths = [M for M in STEP_WIDTHS if EXACT_TOKENS < M <= width_for(size.sequences)]
        taken = self.opened.part_tokens(self.device)
        return GRAPH_BYTES * sum(
            -(-M // taken) * len(list(kv_lens(size.context, M))) for M in widths
        )

    def widened_bytes(self, size: CacheSize) -> int:
        """Memory on a GPU of keys and values of a layer, widened for a prompt or a pack of them.

        Prompts of a pack have no more keys than one may have, but a page each that is not full.
        """
        if not self.cache_type.scaled:
            return 0
        mtp, plain = self.opened.lone_mtp, plain_cache(self.dtype)
        count = pages_for(size.context) + PACK_SEQUENCES
        if mtp is not None:  # whose layer has the heads of all ranks
            return head_pages(mtp.config, count, plain, "meta").size_bytes
        config = self.opened.config
        return kv_pages(config, count, plain, "meta").size_bytes // max(1, config.kv_layers)

    def drafter_bytes(self) -> int:
        """Memory on a GPU of outputs of a chunk that a drafter reads, apart and side by side."""
        drafter = self.opened.drafter
        if drafter is None or drafter.config.block_drafts is None:
            return 0
        taken = len(drafter.config.block_drafts.target_layers) * drafter.config.hidden_size
        return 2 * MOST_CHUNK * taken * self.dtype.itemsize

    def needed(self, size: CacheSize, pages: int) -> int:
        """Memory of weights, sequences and so many pages, without HEADROOM."""
        workspace = 0
        if self.device != "cpu":
            workspace = GPU_WORKSPACE + self.widened_bytes(size) + self.graph_bytes(size)
            workspace += self.drafter_bytes()
            workspace += SHARED_WORKSPACE if self.ranks > 1 else 0
        kind = self.device, self.dtype
        drafting = self.opened.drafting_bytes(*kind)
        weights = (self.opened.weight_bytes(*kind) - drafting) * self.processes + drafting
        weights += self.vision_bytes
        return weights + workspace + self.row_bytes(size) + self.page_bytes(pages)

    def snapshots_that_fit(self, size: CacheSize, free: int) -> int:
        """Snapshots in what a CPU has left beside a cache, or in memory of a GPU's host.

        All ranks keep their parts of them there.
        """
        each = state_bytes(self.opened.config, self.dtype.itemsize) * self.ranks  # of one host
        if self.device != "cpu":
            return snapshots_for(size.pages, each, free_bytes("cpu"))
        left = int(free / HEADROOM) - self.needed(size, size.all_pages)
        return max(size.snapshots, snapshots_for(size.pages, each, left))

    def pages_that_fit(self, size: CacheSize, free: int) -> int:
        """Pages for tokens that fit into free memory beside weights and sequences."""
        each = max(1, self.page_bytes(1))  # 0 where every layer is linear
        return int((free / HEADROOM - self.needed(size, 0)) // each) - EXTRA


@dataclass(frozen=True, slots=True)
class ChosenSequences:
    """Number of sequences that are decoded together."""

    count: int
    reason: str | None = None  # why it was chosen; None where the options name it


@dataclass(frozen=True, slots=True)
class Decided:
    """Sizes that memory has decided, and what they follow from."""

    account: Account  # whose model has the head for multi-token prediction only where it is used
    options: LoadOptions  # with the number of sequences and the source of drafts
    sequences: "ChosenSequences"
    kv_cache: "ChosenType"
    cache: CacheSize

    def keeps(self, other: "Decided", share: float) -> bool:
        """Tell if a cache has all that another has, of sequences and tokens a share at least."""
        same = (
            self.kv_cache.cache_type == other.kv_cache.cache_type
            and self.options.speculate == other.options.speculate
            and self.cache.context == other.cache.context
        )
        counts = self.sequences.count, self.cache.pages
        others = other.sequences.count, other.cache.pages
        return same and all(a >= share * b for a, b in zip(counts, others, strict=True))


def choose_sequences(account: Account, options: LoadOptions) -> ChosenSequences:
    """Sequences that options ask for; without a number, as many as memory has room for.

    They leave one sequence all of its context. Where memory is too short for that, they take up to
    one part of SHORTER of what one would have alone. On a GPU each has room for a prompt and an
    answer of ANSWER_LENGTH in the cache. A CPU gains little by more than SEQUENCES.

    Raises:
        RequestError: as `choose_cache`.
    """
    if options.max_sequences is not None:
        return ChosenSequences(options.max_sequences)
    free, on_cpu = free_bytes(account.device), account.device == "cpu"
    if free is None:
        return ChosenSequences(SEQUENCES, "the default since free memory is not known")
    if options.kv_cache == INT8_CACHE.name:
        account = replace(account, cache_type=INT8_CACHE)
    drafts = options.most_drafts(recurrent=account.opened.config.linear_layers is not None)
    most = SEQUENCES if on_cpu else CHOSEN_SEQUENCES

    def pages(count: int) -> int:
        """Pages of the cache beside the rows and states of so many sequences."""
        size = asked_cache(account, replace(options, max_sequences=count), drafts)
        return min(account.pages_that_fit(size, free), size.pages)

    alone = pages(1)
    context = asked_cache(account, options, drafts).context
    each = min(alone, pages_for(min(context, ANSWER_LENGTH)))
    if each < 1:
        return ChosenSequences(1, "memory is short")
    share = 0 if on_cpu else each
    kept = alone if alone >= pages_for(context) else alone - alone // SHORTER

    def too_many(count: int) -> bool:
        return pages(count) < max(kept, share * count)

    count = bisect_left(range(1, 1 + most), True, key=too_many)
    if count < most and pages(count + 1) < kept:
        asked = options.cache_tokens is not None
        lost = "leave too little for cache_tokens" if asked else "shorten the context"
        return ChosenSequences(count, f"more would {lost}")
    if on_cpu:
        return ChosenSequences(count, "the default on a CPU")
    reason = f"with a cache of {each * PAGE:,} tokens each"
    if count == CHOSEN_SEQUENCES:
        return ChosenSequences(count, f"the most by default, {reason}")
    return ChosenSequences(count, f"as many as fit {reason}")


@dataclass(frozen=True, slots=True)
class ChosenType:
    """Type of the keys and values in a cache."""

    cache_type: CacheType  # of all of them
    reason: str | None = None  # why `auto` has chosen it; None where the options name it


def choose_cache_type(account: Account, options: LoadOptions, drafts: int = 0) -> ChosenType:
    """Type of the cache that options ask for; `auto` keeps activations as they are while they fit.

    Raises:
        RequestError: as `choose_cache`.
    """
    plain = account.cache_type
    if options.kv_cache != "auto":
        return ChosenType(INT8_CACHE if options.kv_cache == INT8_CACHE.name else plain)
    asked, free = asked_cache(account, options, drafts), free_bytes(account.device)
    pages = asked.pages
    if account.auto_tokens is not None:
        pages = min(pages, pages_for(account.auto_tokens))
    tokens = f"a cache of {pages * PAGE:,} tokens"
    if account.device != "cpu" and asked.context >= LONG_CONTEXT:
        reason = f"sequences of up to {asked.context:,} tokens are read faster"
        return ChosenType(INT8_CACHE, reason)
    if account.device != "cpu" and asked.sequences > EXACT_TOKENS:
        reason = f"keys and values of up to {asked.sequences} sequences are read faster"
        return ChosenType(INT8_CACHE, reason)
    if free is None or account.pages_that_fit(asked, free) >= pages:
        return ChosenType(plain, f"{tokens} fits")
    return ChosenType(INT8_CACHE, f"{tokens} does not fit in {plain.name}")


def choose_cache(account: Account, options: LoadOptions, drafts: int = 0) -> CacheSize:
    """Sizes of the cache, after checking that it fits into free memory beside the weights.

    Raises:
        RequestError: a context that the model has no positions for, or fewer tokens than the
            context.
        ResourceError: weights, or weights and cache, do not fit.
    """
    context, tokens = options.context, options.cache_tokens
    asked, free = asked_cache(account, options, drafts), free_bytes(account.device)
    wanted = asked.context
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


def asked_cache(account: Account, options: LoadOptions, drafts: int) -> CacheSize:
    """The cache that options ask for, whether it fits or not; arguments as in `choose_cache`.

    Raises:
        RequestError: as `choose_cache`.
    """
    context, tokens = options.context, options.cache_tokens
    sequences = options.max_sequences or SEQUENCES
    limit = account.opened.config.max_position_embeddings
    if context is not None and not 1 <= context <= limit:
        raise RequestError(
            f"context {context}: the model has positions for 1 to {limit} tokens",
            hint="a longer context needs YaRN in its config.json: see docs/long-contexts.md",
        )
    wanted = context or min(limit, DEFAULT_CONTEXT)
    if tokens is not None and tokens < wanted:
        raise RequestError(f"a cache of {tokens} tokens is smaller than the context of {wanted}")
    return CacheSize(
        context=wanted,
        sequences=sequences,
        pages=pages_for(tokens) if tokens else sequences * pages_for(wanted),
        snapshots=SNAPSHOTS + sequences,
        drafts=drafts_together(drafts, sequences),
    )


def _too_large(account: Account, size: CacheSize, free: int, least: int | None) -> ResourceError:
    """The error of a cache that does not fit; its hint names a size that does, or a type.

    least: tokens of a cache whose size has been asked for; None where only the context has.
    """
    need = int(account.needed(size, size.all_pages) * HEADROOM)
    tower = account.vision_bytes
    fitting = _fitting(account, size, free, least)
    hints = [fitting or "the weights alone do not fit"]
    if not account.cache_type.scaled:
        halved = replace(account, cache_type=INT8_CACHE)
        if halved.pages_that_fit(size, free) >= size.pages:
            hints.insert(0, "--kv-cache int8 fits")
        elif other := _fitting(halved, size, free, least):
            hints.append(f"with --kv-cache int8, {other}")
    if tower:
        place = "--vision-device cpu" if account.device != "cpu" else "--vision-device auto"
        hints.append(f"{place} keeps nothing for images")
    undrafted = replace(account.follower, vision_bytes=tower).needed(size, size.all_pages)
    drafting = need - int(undrafted * HEADROOM)
    if account.ranks > 1 and drafting:
        hints.append(f"{gigabytes(drafting)} of it the first process alone takes, which drafts")
    beside = f"the vision tower with an image ({gigabytes(tower)}), " if tower else ""
    return ResourceError(
        f"needs {gigabytes(need)} for {beside}weights and a cache ({account.cache_type.name}) of "
        f"{size.pages * PAGE} tokens for {size.sequences} "
        f"sequence{'s' if size.sequences > 1 else ''}, free on {account.device}: "
        f"{gigabytes(free)}",
        hint="; ".join(hints),
    )


def _fitting(account: Account, size: CacheSize, free: int, least: int | None) -> str | None:
    """A cache that fits, in words; None where not even a short one does. See `_too_large`."""
    fits = account.pages_that_fit(size, free) * PAGE
    one = replace(size, sequences=1, snapshots=SNAPSHOTS + 1)
    alone = account.pages_that_fit(one, free) * PAGE
    limit = account.opened.config.max_position_embeddings
    if least is not None and fits >= least:
        return f"a cache of {fits} tokens fits"
    if fits >= MIN_CONTEXT:
        return f"--context {min(fits, limit)} fits"
    if alone >= MIN_CONTEXT:
        return f"one sequence with --context {min(alone, limit)} fits"
    return None


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
