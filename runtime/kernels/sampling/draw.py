"""draw_rows: draw a token of each row among its likeliest, as `cpu_sampling.drawn` draws it.

Layout  logits [M, V or more] fp32, keys [M, groups] int64 of 64 logits each (`choose`) ->
        token [M] int64, ring [RING, R] int64 on the host
Bytes   per row top_k programs of 4 * 1024 + 8 * V / 64; V = 151936, top_k 20: 0.5 MB, from L2
Plan    Nothing is sorted one key after another: a key's rank is the number of better keys, and no
        two keys are equal. A program per block of a row's logits ends if top_k blocks are better;
        else it ranks its 16 groups among all groups, each thread comparing with a share of these.
        The top_k best groups hold the top_k best logits, and store the best key of each of their
        parts. Then one program a row, a thread a key, ranks the parts, then the logits of the best
        parts, and draws from the best logits in exact integers. Each row has its own top_k, up to
        the class of the launch; a row of temperature 0 takes the first of one. No atomics
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import power_of_two, programmatic_launch, run
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    declaration,
    load8,
    load_shared4,
    load_shared8,
    load_shared16,
    shared_buffer,
    store_shared4,
    store_shared8,
)
from lowbit.runtime.kernels.ptx.mma import across, as_float, as_word, threads, total
from lowbit.runtime.kernels.sampling.keys import BLOCK, GROUP, LOWEST, id_of, key_of, value_of
from lowbit.runtime.kernels.sampling.row import (
    add,
    draw_parameters,
    rounded_masses,
    settle,
    uniform,
)
from lowbit.runtime.state.sampler import SamplerRows

PART = gl.constexpr(8)  # logits of a part of a group, those of one thread
LANES = gl.constexpr(GROUP.value // PART.value)  # parts of a group
RANK_WARPS = gl.constexpr(BLOCK.value // PART.value // 32)  # of a program that ranks groups


@gluon.jit
def _words(key):
    return key.to(gl.int32), (key >> 32).to(gl.int32)


@gluon.jit
def _joined(low, high):
    return (high.to(gl.int64) << 32) | (low.to(gl.int64) & 0xFFFFFFFF)


@gluon.jit
def _load_key(at):
    low, high = load_shared8(at)
    return _joined(low, high)


@gluon.jit
def _candidates(temperature, top_k, V, K: gl.constexpr):
    """Number of tokens that a row draws from: 1 to K, at most V, whatever its parameters are."""
    top_k = gl.where(temperature == 0.0, 1, top_k)
    return gl.minimum(gl.maximum(gl.minimum(top_k, K), 1), V).to(gl.int32)


@gluon.jit
def _rank_groups_rows_kernel(
    logits_ptr, keys_ptr, blocks_ptr, parts_ptr, rows_ptr, knobs_ptr, whole_ptr, count, stride, V,
    K: gl.constexpr, EACH: gl.constexpr, BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Keep the parts of the groups of a block that are among the top_k best of a row.

    A program whose block is not among the top_k best blocks has none, and ends. K: most candidates
    of a row; EACH: keys of groups that a thread compares; BLOCKS: a power of two.
    """
    WARPS: gl.constexpr = RANK_WARPS
    GROUPS: gl.constexpr = BLOCK // GROUP
    buffer = shared_buffer(declaration(GROUPS * (8 + WARPS * 4)))
    m = gl.program_id(1).to(gl.int64)
    row = gl.load(rows_ptr + m).to(gl.int64)  # older than the kernel ahead, which has waited
    parameters = draw_parameters(row, knobs_ptr, whole_ptr)
    top_k = _candidates(parameters[0], parameters[3], V, K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    logits, keys = logits_ptr + m * stride, keys_ptr + m * count
    parts = parts_ptr + m * (K * LANES)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    block = gl.arange(0, BLOCKS, layout=L)
    bests = blocks_ptr + m * gl.num_programs(0)
    best = gl.load(bests + block, mask=block < gl.num_programs(0), other=LOWEST)
    better = gl.sum((best > gl.load(bests + gl.program_id(0))).to(gl.int32), axis=0)
    if better < top_k:
        warp, lane, zero, _ = threads(WARPS)
        thread = warp * 32 + lane
        groups_at = buffer + zero
        ranks_at = groups_at + GROUPS * 8
        others = _keys_of_thread(keys, count, thread, EACH)
        part = gl.full([WARPS, 32], LOWEST, gl.int64, layout=thread.type.layout)
        for i in gl.static_range(PART):
            id = gl.program_id(0) * BLOCK + thread * PART + i
            x = gl.load(logits + id, mask=id < V, other=float("-inf"))
            part = gl.maximum(part, key_of(x, id))
        whole = _words(_best_of_group(part))
        store_shared8(groups_at + thread // LANES * 8, whole, lane % LANES == 0)
        barrier()
        for group in gl.static_range(0, GROUPS, 2):
            w = load_shared16(groups_at, group * 8)
            even = zero
            odd = zero
            for i in gl.static_range(EACH):
                even += (others[i] > _joined(w[0], w[1])).to(gl.int32)
                odd += (others[i] > _joined(w[2], w[3])).to(gl.int32)
            at = ranks_at + (group * WARPS + warp) * 4
            store_shared4(at, as_float(total(even)), lane == 0)
            store_shared4(at + WARPS * 4, as_float(total(odd)), lane == 0)
        barrier()
        rank = zero
        for i in gl.static_range(WARPS):
            rank += as_word(load_shared4(ranks_at + thread // LANES * (WARPS * 4), i * 4))
        at = rank * LANES + thread % LANES
        gl.store(parts + at, part, mask=rank < top_k)


@gluon.jit
def _keys_of_thread(keys_ptr, count, thread, EACH: gl.constexpr):
    """EACH of a row's keys, a different share for every thread."""
    keys = keys_ptr.to(gl.int64, bitcast=True)
    shares = ()
    for i in gl.static_range(EACH):
        at = i * (RANK_WARPS * 32) + thread
        low, high = load8(keys + gl.minimum(at, count - 1).to(gl.int64) * 8)
        shares = shares + (gl.where(at < count, _joined(low, high), LOWEST),)
    return shares


@gluon.jit
def _best_of_group(key):
    """The best key of the LANES lanes that share a group."""
    for i in gl.static_range(5):
        if (1 << i) < LANES:
            low, high = _words(key)
            low = as_word(across(as_float(low), 1 << i))
            high = as_word(across(as_float(high), 1 << i))
            key = gl.maximum(key, _joined(low, high))
    return key


@gluon.jit
def _rank(key, at, count):
    """Number of better keys among the `count` at an address of shared memory.

    32 keys are loaded at once: one by one, their latency would be all the time it takes.
    """
    even = at * 0
    odd = even
    for _ in range(0, count, 32):
        words = ()
        for i in gl.static_range(16):
            words = words + (load_shared16(at, i * 16),)
        for i in gl.static_range(16):
            w = words[i]
            even += (_joined(w[0], w[1]) > key).to(gl.int32)
            odd += (_joined(w[2], w[3]) > key).to(gl.int32)
        at += 256
    return even + odd


@gluon.jit
def _draw_rows_kernel(
    logits_ptr, parts_ptr, rows_ptr, knobs_ptr, whole_ptr, positions_ptr, token_ptr, ring_ptr,
    counts_ptr, ids_ptr, groups, stride, V, R, K: gl.constexpr, COUNTED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Draw a row's token from the parts of its best groups, and settle it.

    K: most candidates of a row, a PART-th of the threads.
    """
    THREADS: gl.constexpr = K * PART
    WARPS: gl.constexpr = K * PART // 32
    warp, lane, zero, _ = threads(WARPS)
    thread = warp * 32 + lane
    base = shared_buffer(declaration((THREADS + K) * 8))
    keys_at = base + zero
    best_at = keys_at + THREADS * 8
    m = gl.program_id(0).to(gl.int64)
    row = gl.load(rows_ptr + m).to(gl.int64)  # all of these are older than the kernel ahead
    position = gl.load(positions_ptr + m)
    temperature, top_p, min_p, top_k, seed = draw_parameters(row, knobs_ptr, whole_ptr)
    top_k = _candidates(temperature, top_k, V, K)
    number = uniform(seed, (position + 1).to(gl.int64))
    temperature = gl.where(temperature == 0.0, 1.0, temperature)
    count = gl.minimum(top_k, groups) * LANES
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    key = gl.load(parts_ptr + m * (K * LANES) + thread, mask=thread < count, other=LOWEST)
    store_shared8(keys_at + thread * 8, _words(key), thread >= 0)
    barrier()
    rank = _rank(key, keys_at, count)
    store_shared8(best_at + rank * 8, _words(key), (thread < count) & (rank < top_k))
    barrier()
    part = _load_key(best_at + gl.minimum(thread // PART, top_k - 1) * 8)
    id = id_of(part) // PART * PART + thread % PART
    x = gl.load(logits_ptr + m * stride + id, mask=id < V, other=float("-inf"))
    inside = thread < top_k * PART
    key = gl.where(inside, key_of(x, id), LOWEST)
    store_shared8(keys_at + thread * 8, _words(key), thread >= 0)
    barrier()
    rank = _rank(key, keys_at, top_k * PART)
    store_shared8(best_at + rank * 8, _words(key), inside & (rank < top_k))
    barrier()

    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    rank = gl.arange(0, K, layout=L)
    inside = rank < top_k
    best = _load_key(base + (THREADS * 8) + gl.minimum(rank, top_k - 1) * 8)
    highest = value_of(_load_key(base + (THREADS * 8) + rank * 0)).to(gl.float64)
    odds = gl.exp((value_of(best).to(gl.float64) - highest) / temperature)
    mass = gl.where(inside, rounded_masses(odds), 0.0).to(gl.int64)
    reached = gl.associative_scan(mass, 0, add)
    whole = gl.sum(mass, axis=0)
    # Both filters keep the likeliest: what passes both is a prefix too.
    kept = inside & ((reached - mass).to(gl.float64) < top_p * whole.to(gl.float64))
    kept = kept & (odds >= min_p)
    limit = gl.sum(gl.where(kept, mass, 0), axis=0)
    last = gl.maximum(gl.sum(kept.to(gl.int32), axis=0) - 1, 0)
    target = gl.minimum((number * limit.to(gl.float64)).to(gl.int64), limit - 1)
    place = gl.minimum(gl.sum((inside & (reached <= target)).to(gl.int32), axis=0), last)
    chosen = id_of(_load_key(base + (THREADS * 8) + place * 8)).to(gl.int64)
    chosen = gl.minimum(gl.maximum(chosen, 0), V - 1)  # whatever the logits are
    largest = value_of(_load_key(base + (THREADS * 8) + place * 0))
    settle(
        m, row, position, chosen, largest,
        positions_ptr, token_ptr, ring_ptr, counts_ptr, ids_ptr, R, V, COUNTED,
    )  # fmt: skip


def draw_rows(
    logits: Tensor,
    keys: Tensor,
    blocks: Tensor,
    sampler: SamplerRows,
    rows: Tensor,
    positions: Tensor,
    token: Tensor,
    ring: Tensor,
    ids: Tensor | None = None,
) -> None:
    """Draw and settle the next token of every row, from 2 to 64 candidates; see `Ops.choose`.

    Logits are adjusted; keys and blocks are what `best_rows` finds for groups of GROUP logits.
    """
    M, count = keys.shape
    K, stride, V = sampler.shape.candidates, logits.stride(0), sampler.vocabulary
    parts = torch.empty((M, K * LANES.value), dtype=torch.int64, device=logits.device)
    parameters = rows, sampler.knobs, sampler.whole
    pdl = programmatic_launch(logits)
    run(
        _rank_groups_rows_kernel,
        (blocks.shape[1], M),
        *(logits, keys, blocks, parts, *parameters, count, stride, V),
        K=K,
        EACH=-(-count // (RANK_WARPS.value * 32)),
        BLOCKS=power_of_two(blocks.shape[1]),
        PDL=pdl,
        num_warps=RANK_WARPS.value,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    run(
        _draw_rows_kernel,
        (M,),
        *(logits, parts, *parameters, positions, token, ring, sampler.counts, ids),
        *(count, stride, V, sampler.rows),
        K=K,
        COUNTED=sampler.shape.adjusted,
        PDL=pdl,
        num_warps=K * PART.value // 32,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
