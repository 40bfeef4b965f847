"""exchange: words of the GPUs that share a model, pushed into each other's memory.

    exchange_sum:      y = added + partial of rank 0 + ... + partial of the last     (FP32 sums)
    exchange_columns:  y = [part of rank 0 | ... | part of the last]
    exchange_first:    every rank gets the words of rank 0
    sum_pushed:        exchange_sum of one token, whose product pushes its partial sums itself

Layout  buffer of each GPU [2, ranks, MOST_PUSHED] of 8 bytes, a word and its number, for products
        that push; behind it [2, ranks, PROGRAMS, BLOCK] of them for all other launches
Bytes   8 * words to each peer over the link between GPUs
Plan    a program pushes a block of its rank's words to all peers, each word with a number, and
        waits for theirs in its own memory: nobody reads a peer's. A word with its number is one
        store, so that no fence is needed. A program that has more blocks takes them in turn. The
        numbers of a program count its blocks, from one launch to the next, in memory of the device:
        so a recorded launch can be replayed. Blocks take the two halves of the buffer in turn. A
        half can be written again: who does so has got words of the block in between, which a
        program pushes once all its lanes have read those before. All ranks make the same launches
        in the same order
Pushed  a product that pushes reads its number behind its wait, and lets the exchange start only
        then: so the one before has counted itself. The exchange waits for words of all ranks, its
        own too, and for the end of the product only before it counts itself: it neither waits for
        the last program of the product, which may not have its number yet, nor reads its result
Sums    neighbors are added, then pairs of them, on every rank; then what is added, in FP32, before
        the one rounding. So all ranks have the same bits
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import programmatic_launch, run
from lowbit.runtime.kernels.linear.sums import tree_sum
from lowbit.runtime.kernels.ptx.memory import barrier
from lowbit.runtime.kernels.ptx.mma import as_float, as_word, threads
from lowbit.runtime.kernels.ptx.peers import (
    MOST_PUSHED,
    PACKET,
    PACKET_BYTES,
    Peers,
    await_word,
    push_word,
)
from lowbit.runtime.weights.share import Share

WARPS = 4  # of a program
EACH = 4  # words of a lane in a block
BLOCK = WARPS * 32 * EACH  # words
PROGRAMS = 256  # at most
PUSHED_PROGRAMS = MOST_PUSHED // (WARPS * 32)


def buffer_words(ranks: int) -> int:
    """Length of `Peers.own`."""
    return 2 * ranks * (PROGRAMS * BLOCK + MOST_PUSHED)


@dataclass(frozen=True, slots=True, eq=False)
class ExchangePlan:
    """Constants of a launch; made once, so compared by identity."""

    RANK: int  # this one
    RANKS: int
    STARTS: tuple[int, ...]  # first column of each rank in y, of `exchange_columns`
    WIDTHS: tuple[int, ...]  # columns of each
    WARPS: int
    EACH: int
    BLOCK: int
    PROGRAMS: int
    PDL: bool  # whether the kernel takes part in programmatic launch
    BEHIND: int  # bytes of a buffer for products that push, before the others
    MOST_PUSHED: int


@cache
def _plan(share: Share, pdl: bool, widths: tuple[int, ...] = ()) -> ExchangePlan:
    starts = tuple(sum(widths[:rank]) for rank in range(len(widths)))
    constants = WARPS, EACH, BLOCK, PROGRAMS
    pushed = 2 * share.ranks * MOST_PUSHED * PACKET_BYTES, MOST_PUSHED
    return ExchangePlan(share.rank, share.ranks, starts, widths, *constants, pdl, *pushed)


@gluon.jit
def _begin(counters_ptr, count, PLAN: gl.constexpr):
    """A lane's place in a block, blocks of this program, and those before this launch."""
    warp, lane, zero, _ = threads(PLAN.WARPS)
    if PLAN.PDL:
        gdc_launch_dependents()  # the next kernel loads its weights meanwhile
        gdc_wait()
    blocks = gl.cdiv(count, PLAN.BLOCK)
    own = gl.cdiv(blocks - gl.program_id(0), gl.num_programs(0))
    return warp * 32 + lane, own, gl.load(counters_ptr + (gl.program_id(0) + zero))


@gluon.jit
def _end(counters_ptr, place, number):
    """Keep the number of the last block, behind a barrier: all lanes have read the first one's."""
    gl.store(counters_ptr + (gl.program_id(0) + place), number, mask=place == 0)


@gluon.jit
def _slot(number, place, RANK: gl.constexpr, PLAN: gl.constexpr):
    """Offset in bytes of a rank's word in a buffer."""
    half = (number & 1) * PLAN.RANKS + RANK
    block = half * PLAN.PROGRAMS + gl.program_id(0)
    return PLAN.BEHIND + (block * PLAN.BLOCK + place).to(gl.int64) * PACKET


@gluon.jit
def _push(peers_ptr, word, number, place, inside, PLAN: gl.constexpr):
    """Push a lane's word into the buffers of all other ranks."""
    RANKS: gl.constexpr = PLAN.RANKS
    at = _slot(number, place, PLAN.RANK, PLAN)
    for rank in gl.static_range(RANKS):
        if rank != PLAN.RANK:
            push_word(gl.load(peers_ptr + rank) + at, word, number, inside)


@gluon.jit
def _words(own_ptr, aborted_ptr, word, number, place, inside, PLAN: gl.constexpr):
    """The words of all ranks in a lane's place, in the order of the ranks."""
    RANKS: gl.constexpr = PLAN.RANKS
    own = own_ptr.to(gl.int64, bitcast=True)
    aborted = aborted_ptr.to(gl.int64, bitcast=True) + place.to(gl.int64) * 0
    words = ()
    for rank in gl.static_range(RANKS):
        if rank == PLAN.RANK:
            words = words + (word,)
        else:
            at = own + _slot(number, place, rank, PLAN)
            words = words + (await_word(at, number, aborted, inside),)
    return words


@gluon.jit(do_not_specialize=["count"])
def _exchange_sum_kernel(
    partial_ptr, added_ptr, y_ptr, own_ptr, peers_ptr, counters_ptr, aborted_ptr, count,
    PLAN: gl.constexpr,
):  # fmt: skip
    RANKS: gl.constexpr = PLAN.RANKS
    EACH: gl.constexpr = PLAN.EACH
    THREADS: gl.constexpr = PLAN.WARPS * 32
    place, blocks, before = _begin(counters_ptr, count, PLAN)
    for turn in range(blocks):
        first = (gl.program_id(0) + turn * gl.num_programs(0)) * PLAN.BLOCK
        number = before + 1 + turn
        own = ()
        for i in gl.static_range(EACH):
            here = place + i * THREADS
            inside = first + here < count
            x = gl.load(partial_ptr + (first + here), mask=inside, other=0.0)
            own = own + (as_word(x),)
            _push(peers_ptr, own[i], number, here, inside, PLAN)
        for i in gl.static_range(EACH):
            here = place + i * THREADS
            inside = first + here < count
            words = _words(own_ptr, aborted_ptr, own[i], number, here, inside, PLAN)
            parts = ()
            for rank in gl.static_range(RANKS):
                parts = parts + ((words[rank],),)
            y = tree_sum(parts, 1)[0]
            if added_ptr is not None:
                y += gl.load(added_ptr + (first + here), mask=inside, other=0.0).to(gl.float32)
            gl.store(y_ptr + (first + here), y.to(y_ptr.dtype.element_ty), mask=inside)
        barrier()  # no warp pushes on while another looks for words of this block
    _end(counters_ptr, place, before + blocks)


@gluon.jit(do_not_specialize=["count"])
def _sum_pushed_kernel(
    added_ptr, y_ptr, own_ptr, numbers_ptr, aborted_ptr, count, PLAN: gl.constexpr
):  # fmt: skip
    """A program has a word for each thread."""
    RANKS: gl.constexpr = PLAN.RANKS
    warp, lane, zero, _ = threads(PLAN.WARPS)
    if PLAN.PDL:
        gdc_launch_dependents()
    thread = warp * 32 + lane
    number = gl.load(numbers_ptr + (gl.program_id(0) + zero)) + 1
    place = gl.program_id(0) * (PLAN.WARPS * 32) + thread
    inside = place < count
    added = gl.load(added_ptr + place, mask=inside, other=0.0).to(gl.float32)
    own = own_ptr.to(gl.int64, bitcast=True)
    aborted = aborted_ptr.to(gl.int64, bitcast=True) + thread.to(gl.int64) * 0
    parts = ()
    for rank in gl.static_range(RANKS):
        at = (((number & 1) * RANKS + rank) * PLAN.MOST_PUSHED + place).to(gl.int64) * PACKET
        parts = parts + ((await_word(own + at, number, aborted, inside),),)
    y = tree_sum(parts, 1)[0] + added
    gl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)
    barrier()
    if PLAN.PDL:
        gdc_wait()  # every program of the product has read its number
    _end(numbers_ptr, thread, number)


@gluon.jit(do_not_specialize=["count", "width", "N"])
def _exchange_columns_kernel(
    part_ptr, y_ptr, own_ptr, peers_ptr, counters_ptr, aborted_ptr, count, width, N,
    PLAN: gl.constexpr,
):  # fmt: skip
    """width: columns of the rank that has most; others push zeros behind theirs."""
    RANKS: gl.constexpr = PLAN.RANKS
    OWN: gl.constexpr = PLAN.WIDTHS[PLAN.RANK]
    EACH: gl.constexpr = PLAN.EACH
    THREADS: gl.constexpr = PLAN.WARPS * 32
    place, blocks, before = _begin(counters_ptr, count, PLAN)
    for turn in range(blocks):
        first = (gl.program_id(0) + turn * gl.num_programs(0)) * PLAN.BLOCK
        number = before + 1 + turn
        own = ()
        for i in gl.static_range(EACH):
            here = place + i * THREADS
            row = ((first + here) // width).to(gl.int64)
            column = (first + here) % width
            inside = first + here < count
            x = gl.load(part_ptr + (row * OWN + column), mask=inside & (column < OWN), other=0.0)
            own = own + (as_word(x),)
            _push(peers_ptr, own[i], number, here, inside, PLAN)
        for i in gl.static_range(EACH):
            here = place + i * THREADS
            row = ((first + here) // width).to(gl.int64)
            column = (first + here) % width
            inside = first + here < count
            words = _words(own_ptr, aborted_ptr, own[i], number, here, inside, PLAN)
            for rank in gl.static_range(RANKS):
                at = row * N + (column + PLAN.STARTS[rank])
                stored = inside & (column < PLAN.WIDTHS[rank])
                gl.store(y_ptr + at, as_float(words[rank]), mask=stored)
        barrier()  # no warp pushes on while another looks for words of this block
    _end(counters_ptr, place, before + blocks)


@gluon.jit(do_not_specialize=["count", "width", "stride"])
def _exchange_first_kernel(
    words_ptr, own_ptr, peers_ptr, counters_ptr, aborted_ptr, count, width, stride,
    PLAN: gl.constexpr,
):  # fmt: skip
    """width: words of a row; stride: from one row to the next."""
    EACH: gl.constexpr = PLAN.EACH
    THREADS: gl.constexpr = PLAN.WARPS * 32
    place, blocks, before = _begin(counters_ptr, count, PLAN)
    for turn in range(blocks):
        first = (gl.program_id(0) + turn * gl.num_programs(0)) * PLAN.BLOCK
        number = before + 1 + turn
        own = ()
        for i in gl.static_range(EACH):
            here = place + i * THREADS
            inside = first + here < count
            at = (first + here) // width * stride + (first + here) % width
            own = own + (gl.load(words_ptr + at, mask=inside, other=0),)
            _push(peers_ptr, own[i], number, here, inside, PLAN)
        for i in gl.static_range(EACH):
            here = place + i * THREADS
            inside = first + here < count
            at = (first + here) // width * stride + (first + here) % width
            words = _words(own_ptr, aborted_ptr, own[i], number, here, inside, PLAN)
            gl.store(words_ptr + at, words[0], mask=inside)
        barrier()  # no warp pushes on while another looks for words of this block
    _end(counters_ptr, place, before + blocks)


def exchange_sum_ref(partials: list[Tensor], added: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The value `exchange_sum` gives on every rank."""
    sums = partials
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [a + b for a, b in pairs] + sums[len(sums) // 2 * 2 :]
    return (sums[0] if added is None else sums[0] + added.float()).to(dtype)


def exchange_sum(partial: Tensor, added: Tensor | None, peers: Peers, dtype: torch.dtype) -> Tensor:
    """Sum of all ranks' partial sums and what is added, rounded once: [M, N].

    Args:
        partial: [M, N] float32, contiguous.
        added: [M, N], contiguous; the same on every rank. None for nothing.
        peers: memory of all ranks.
        dtype: of the result.
    """
    y = torch.empty(partial.shape, dtype=dtype, device=partial.device)
    plan = _plan(peers.share, programmatic_launch(partial))
    _launch(_exchange_sum_kernel, (partial, added, y), peers, (partial.numel(),), plan)
    return y


def sum_pushed(y: Tensor, added: Tensor, peers: Peers) -> None:
    """`exchange_sum` of one token whose partial sums the launch before has pushed.

    Args:
        y: [1, N], the result. Made before that launch: the memory of its own sums must not be y's.
        added: [1, N], contiguous; the same on every rank.
        peers: memory of all ranks.
    """
    plan = _plan(peers.share, programmatic_launch(y))
    run(
        _sum_pushed_kernel,
        (-(-y.numel() // (WARPS * 32)),),
        added,
        y,
        peers.own,
        peers.numbers,
        peers.aborted,
        y.numel(),
        PLAN=plan,
        num_warps=WARPS,
        launch_pdl=plan.PDL,
        enable_fp_fusion=True,
    )


def exchange_columns(part: Tensor, widths: tuple[int, ...], peers: Peers) -> Tensor:
    """Columns of all ranks side by side: [M, sum of widths] float32.

    Args:
        part: [M, N] float32 of this rank, contiguous.
        widths: N of every rank.
        peers: memory of all ranks.
    """
    M, widest, N = len(part), max(widths), sum(widths)
    y = torch.empty((M, N), dtype=torch.float32, device=part.device)
    plan = _plan(peers.share, programmatic_launch(part), widths)
    _launch(_exchange_columns_kernel, (part, y), peers, (M * widest, widest, N), plan)
    return y


def exchange_first(words: Tensor, peers: Peers) -> None:
    """Write the words of the first rank over those of the others.

    Args:
        words: [M, N] int32, whose rows may lie apart.
        peers: memory of all ranks.
    """
    M, N = words.shape
    plan = _plan(peers.share, programmatic_launch(words))
    _launch(_exchange_first_kernel, (words,), peers, (M * N, N, words.stride(0)), plan)


def _launch(
    kernel: object,
    tensors: tuple[Tensor | None, ...],
    peers: Peers,
    sizes: tuple[int, ...],
    plan: ExchangePlan,
) -> None:
    """Launch a kernel; sizes: the number of words of a rank, then others."""
    run(
        kernel,
        (min(-(-sizes[0] // BLOCK), PROGRAMS),),
        *tensors,
        peers.own,
        peers.addresses,
        peers.counters,
        peers.aborted,
        *sizes,
        PLAN=plan,
        num_warps=WARPS,
        launch_pdl=plan.PDL,
        enable_fp_fusion=True,
    )
