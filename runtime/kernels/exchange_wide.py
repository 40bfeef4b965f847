"""exchange_wide: y = added + partial of rank 0 + ... + partial of the last     (many tokens, BF16).

Layout  x, y [M, N] as one row of values in blocks of BLOCK; every rank owns one block of each set
        of as many as there are ranks. Memory of each GPU, in the order of `WideRoom`: FP32 of its
        own blocks from every rank, BF16 of all blocks, and a number for each of both
Bytes   to each peer 4 / ranks + 2 / ranks a value, where `exchange_sum` pushes 8
Plan    a program has some sets. It pushes partial sums to the owners of their blocks, then adds
        those of its own rank's, rounds once and pushes the result to all, then takes the blocks of
        the others. A number beside a block says that it has come: the launches of that program so
        far. Memory is written again by the next launch: who pushes has ended the one before, so all
        owners have read what it pushed; and an owner pushes once all ranks have come that far
Sums    as in `exchange_sum`, in the same order
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
from lowbit.runtime.kernels.ptx.memory import barrier, load8, load16, store8, store16
from lowbit.runtime.kernels.ptx.mma import bf16_pair, high_half, low_half, threads
from lowbit.runtime.kernels.ptx.peers import (
    Peers,
    await_number,
    fetch8,
    fetch16,
    push_number,
)
from lowbit.runtime.weights.share import Share

WARPS = 8  # of a program
EACH = 2  # times that a lane takes four values of a block
BLOCK = WARPS * 32 * EACH * 4  # values
PROGRAMS = 256  # at most
LEAST = 1 << 18  # values: two H200s add fewer sooner where each pushes all that it has


@dataclass(frozen=True, slots=True)
class WideRoom:
    """Bytes from the start of a rank's memory to what others push there."""

    sets: int  # that there is room for
    sums: int  # FP32 [ranks, sets, BLOCK] for blocks that it owns
    results: int  # BF16 [sets * ranks, BLOCK]
    sum_numbers: int  # int32 [ranks, sets]
    result_numbers: int  # int32 [sets * ranks]
    size: int  # of all


@cache
def wide_room(ranks: int, values: int, start: int) -> WideRoom:
    """Places for launches of up to so many values; start: of the first one, a multiple of 16."""
    sets = -(-values // (BLOCK * ranks))
    sums = start
    results = sums + ranks * sets * BLOCK * 4
    sum_numbers = results + ranks * sets * BLOCK * 2
    result_numbers = sum_numbers + ranks * sets * 4
    return WideRoom(
        sets,
        sums,
        results,
        sum_numbers,
        result_numbers,
        -(-(result_numbers + ranks * sets * 4) // 16) * 16,
    )


@dataclass(frozen=True, slots=True, eq=False)
class WidePlan:
    """Constants of a launch; made once, so compared by identity."""

    RANK: int  # this one
    RANKS: int
    WARPS: int
    EACH: int
    BLOCK: int
    SETS: int  # see `WideRoom`, as the rest
    SUMS: int
    RESULTS: int
    SUM_NUMBERS: int
    RESULT_NUMBERS: int
    PDL: bool  # whether the kernel takes part in programmatic launch


@cache
def _plan(share: Share, room: WideRoom, pdl: bool) -> WidePlan:
    places = room.sets, room.sums, room.results, room.sum_numbers, room.result_numbers
    return WidePlan(share.rank, share.ranks, WARPS, EACH, BLOCK, *places, pdl)


@gluon.jit
def _floats_of(words):
    """The four FP32 of two words of BF16."""
    values = ()
    for i in gl.static_range(2):
        values = values + (low_half(words[i]), high_half(words[i]))
    return values


@gluon.jit
def _push_sums(partial, peers_ptr, first_set, own, number, count, thread, PLAN: gl.constexpr):
    """Push the partial sums of blocks that other ranks own."""
    RANKS: gl.constexpr = PLAN.RANKS
    EACH: gl.constexpr = PLAN.EACH
    for turn in range(own):
        a_set = first_set + turn * gl.num_programs(0)
        for step in gl.static_range(1, RANKS):
            owner = (PLAN.RANK + step) % RANKS
            there = gl.load(peers_ptr + owner)
            row = PLAN.RANK * PLAN.SETS + a_set
            for i in gl.static_range(EACH):
                at = (i * (PLAN.WARPS * 32) + thread) * 4
                value = (a_set * RANKS + owner) * PLAN.BLOCK + at
                inside = value < count
                words = load16(partial + gl.where(inside, value, 0).to(gl.int64) * 4)
                to = PLAN.SUMS + (row.to(gl.int64) * PLAN.BLOCK + at) * 4
                store16(there + to, words, inside)
            barrier()
            push_number(there + (PLAN.SUM_NUMBERS + row * 4), number, thread == 0)


@gluon.jit
def _add_own(
    partial, added_ptr, y_ptr, memory, peers_ptr, aborted, first_set, own, number, count, thread,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Add the partial sums of this rank's blocks, and push the results."""
    RANKS: gl.constexpr = PLAN.RANKS
    EACH: gl.constexpr = PLAN.EACH
    y = y_ptr.to(gl.int64, bitcast=True)
    for turn in range(own):
        a_set = first_set + turn * gl.num_programs(0)
        block = a_set * RANKS + PLAN.RANK
        for step in gl.static_range(1, RANKS):
            row = (PLAN.RANK + step) % RANKS * PLAN.SETS + a_set
            await_number(memory + (PLAN.SUM_NUMBERS + row * 4), number, aborted)
        barrier()
        for i in gl.static_range(EACH):
            at = (i * (PLAN.WARPS * 32) + thread) * 4
            value = block * PLAN.BLOCK + at
            inside = value < count
            safe = gl.where(inside, value, 0).to(gl.int64)
            parts = ()
            for rank in gl.static_range(RANKS):
                if rank == PLAN.RANK:
                    words = load16(partial + safe * 4)
                else:
                    row = (rank * PLAN.SETS + a_set).to(gl.int64)
                    words = fetch16(memory + PLAN.SUMS + (row * PLAN.BLOCK + at) * 4)
                parts = parts + (words,)
            sums = tree_sum(parts, 4)
            if added_ptr is not None:
                more = _floats_of(load8(added_ptr.to(gl.int64, bitcast=True) + safe * 2))
                sums = (sums[0] + more[0], sums[1] + more[1], sums[2] + more[2], sums[3] + more[3])
            result = (bf16_pair(sums[0], sums[1]), bf16_pair(sums[2], sums[3]))
            store8(y + safe * 2, result, inside)
            to = PLAN.RESULTS + (block.to(gl.int64) * PLAN.BLOCK + at) * 2
            for step in gl.static_range(1, RANKS):
                store8(gl.load(peers_ptr + (PLAN.RANK + step) % RANKS) + to, result, inside)
        barrier()
        for step in gl.static_range(1, RANKS):
            there = gl.load(peers_ptr + (PLAN.RANK + step) % RANKS)
            push_number(there + (PLAN.RESULT_NUMBERS + block * 4), number, thread == 0)


@gluon.jit
def _take_others(
    y_ptr, memory, aborted, first_set, own, number, count, thread, PLAN: gl.constexpr
):  # fmt: skip
    """Take the results of the blocks that other ranks own."""
    RANKS: gl.constexpr = PLAN.RANKS
    EACH: gl.constexpr = PLAN.EACH
    y = y_ptr.to(gl.int64, bitcast=True)
    for turn in range(own):
        a_set = first_set + turn * gl.num_programs(0)
        for step in gl.static_range(1, RANKS):
            block = a_set * RANKS + (PLAN.RANK + step) % RANKS
            await_number(memory + (PLAN.RESULT_NUMBERS + block * 4), number, aborted)
            barrier()
            for i in gl.static_range(EACH):
                at = (i * (PLAN.WARPS * 32) + thread) * 4
                value = block * PLAN.BLOCK + at
                here = PLAN.RESULTS + (block.to(gl.int64) * PLAN.BLOCK + at) * 2
                words = fetch8(memory + here)
                inside = value < count
                store8(y + gl.where(inside, value, 0).to(gl.int64) * 2, words, inside)


@gluon.jit(do_not_specialize=["count"])
def _exchange_wide_kernel(
    partial_ptr, added_ptr, y_ptr, own_ptr, peers_ptr, counters_ptr, aborted_ptr, count,
    PLAN: gl.constexpr,
):  # fmt: skip
    """See the module; count: values."""
    warp, lane, zero, _ = threads(PLAN.WARPS)
    if PLAN.PDL:
        gdc_launch_dependents()
        gdc_wait()
    thread = warp * 32 + lane
    sets = gl.cdiv(count, PLAN.BLOCK * PLAN.RANKS)
    own = gl.cdiv(sets - gl.program_id(0), gl.num_programs(0))
    number = gl.load(counters_ptr + (gl.program_id(0) + zero)) + 1
    first = gl.program_id(0) + zero
    wide = thread.to(gl.int64) * 0
    partial = partial_ptr.to(gl.int64, bitcast=True) + wide
    memory = own_ptr.to(gl.int64, bitcast=True) + wide
    aborted = aborted_ptr.to(gl.int64, bitcast=True) + wide
    _push_sums(partial, peers_ptr, first, own, number, count, thread, PLAN)
    _add_own(
        partial, added_ptr, y_ptr, memory, peers_ptr, aborted, first, own, number, count, thread,
        PLAN,
    )  # fmt: skip
    _take_others(y_ptr, memory, aborted, first, own, number, count, thread, PLAN)
    barrier()
    gl.store(counters_ptr + (gl.program_id(0) + thread), number, mask=thread == 0)


def takes_wide(partial: Tensor, peers: Peers, dtype: torch.dtype) -> bool:
    """True if `exchange_wide` adds sums of this size, and faster than `exchange_sum`."""
    fits = LEAST <= partial.numel() <= peers.wide_values and partial.shape[1] % 4 == 0
    return dtype == torch.bfloat16 and fits


def exchange_wide(partial: Tensor, added: Tensor | None, peers: Peers) -> Tensor:
    """Sum of all ranks' partial sums and what is added, rounded once: [M, N] bfloat16.

    Args:
        partial: [M, N] float32, contiguous; N a multiple of 4.
        added: [M, N] bfloat16, contiguous; the same on every rank. None for nothing.
        peers: memory of all ranks.
    """
    y = torch.empty(partial.shape, dtype=torch.bfloat16, device=partial.device)
    room = wide_room(peers.share.ranks, peers.wide_values, peers.wide_start)
    plan = _plan(peers.share, room, programmatic_launch(partial))
    sets = -(-partial.numel() // (BLOCK * peers.share.ranks))
    run(
        _exchange_wide_kernel,
        (min(sets, PROGRAMS),),
        partial,
        added,
        y,
        peers.own,
        peers.addresses,
        peers.wide_counters,
        peers.aborted,
        partial.numel(),
        PLAN=plan,
        num_warps=WARPS,
        launch_pdl=plan.PDL,
        enable_fp_fusion=True,
    )
    return y
