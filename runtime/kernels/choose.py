"""choose: the next token of one sequence, as `lowbit.runtime.sampling.sample` chooses it.

Layout  logits [1, V] fp32 -> token [1] int64; position and the sampler's counter move on by one
Bytes   4*V; V = 151936: 0.6 MB, from L2
Plan    a program per block of the vocabulary keeps the best logit of each group as a sortable key,
        value before id. Warps then list the K best groups of a span, in order; one program merges
        the lists into the K best groups of all, which hold the K best logits, takes those, and
        draws among them in the sampler's exact integers. The best of all is taken K times, by one
        warp, which the hardware does in one instruction: cheaper than sorting for so few. K is 1
        for the likeliest token, then a group is a whole block, else top_k rounded up. No atomics
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.device import programmatic_launch, run
from lowbit.runtime.kernels.launch import power_of_two
from lowbit.runtime.sampling import MASS_BITS, Sampler, SamplingParams

BLOCK = 1024  # logits of a program
GROUP = 4  # logits of which the best is kept
SPAN = 512  # groups of which a warp keeps the best
MOST = 64  # candidates
LOWEST = tl.constexpr(-(2**63))  # below every key


def can_choose(params: SamplingParams) -> bool:
    """Whether the kernels cover the parameters: greedy, or few candidates; no penalties."""
    return not params.penalized and (params.temperature == 0.0 or 0 < params.top_k <= MOST)


@triton.jit
def _keys(x, ids):
    """Keys that order by value, then by the lower id: [BLOCK] int64."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _id(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _value(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _best_kernel(
    logits_ptr, keys_ptr, V, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
    groups: tl.constexpr = BLOCK // GROUP
    best = tl.max(tl.reshape(_keys(x, ids), (groups, GROUP)), axis=1)
    tl.store(keys_ptr + tl.program_id(0) * groups + tl.arange(0, groups), best)


@triton.jit
def _split(keys):
    """Value and rest, the higher the lower the id: no number but -1 for the lowest key there is."""
    rest = (keys & 0x7FFFFFFF).to(tl.int32)
    return (keys >> 32).to(tl.int32), tl.where(keys == LOWEST, -1, rest)


@triton.jit
def _best(value, rest):
    """The best of the keys with these parts, and the key itself."""
    top = tl.max(value, axis=0)
    first = tl.max(tl.where(value == top, rest, -1), axis=0)
    key = (top.to(tl.int64) << 32) | first.to(tl.int64)
    return top, first, tl.where(first < 0, tl.full([], LOWEST, tl.int64), key)


@triton.jit
def _take(keys, count, K: tl.constexpr):
    """The `count` best keys in order, then the lowest there is: [K]. For programs of one warp."""
    value, rest = _split(keys)
    rank = tl.arange(0, K)
    best = tl.full([K], LOWEST, tl.int64)
    for i in range(count):
        top, first, key = _best(value, rest)
        best = tl.where(rank == i, key, best)
        taken = (value == top) & (rest == first)
        value = tl.where(taken, -(2**31), value)
        rest = tl.where(taken, -1, rest)
    return best


@triton.jit
def _merge(keys_ptr, lists, count, K: tl.constexpr, LISTS: tl.constexpr):
    """The `count` best keys of lists of as many, each in order, then the lowest there is: [K]."""
    at = tl.arange(0, LISTS)
    place = tl.zeros([LISTS], tl.int32)
    rank = tl.arange(0, K)
    best = tl.full([K], LOWEST, tl.int64)
    keys = tl.load(keys_ptr + at * count, mask=at < lists, other=LOWEST)
    for i in range(count):
        value, rest = _split(keys)
        _, _, key = _best(value, rest)
        best = tl.where(rank == i, key, best)
        place += (keys == key).to(tl.int32)
        there = (at < lists) & (place < count)
        keys = tl.load(keys_ptr + at * count + place, mask=there, other=LOWEST)
    return best


@triton.jit
def _best_groups_kernel(
    keys_ptr, out_ptr, count, top_k, K: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    keys = tl.load(keys_ptr + at, mask=at < count, other=LOWEST)
    rank = tl.arange(0, K)
    tl.store(out_ptr + tl.program_id(0) * top_k + rank, _take(keys, top_k, K), mask=rank < top_k)


@triton.jit
def _choose_kernel(
    logits_ptr,
    keys_ptr,
    knobs_ptr,
    uniforms_ptr,
    drawn_ptr,
    position_ptr,
    token_ptr,
    count,
    V,
    top_k,
    K: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    MASS: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.arange(0, KEYS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    drawn = tl.load(drawn_ptr)
    if K == 1:
        keys = tl.load(keys_ptr + at, mask=at < count, other=LOWEST)
        chosen = _id(tl.max(keys, axis=0))
    else:
        rank = tl.arange(0, K)
        groups = _merge(keys_ptr, count, top_k, K, KEYS)
        first = tl.where(groups == LOWEST, V, _id(groups) // GROUP * GROUP)
        ids = (first[:, None] + tl.arange(0, GROUP)[None, :]).to(tl.int32)
        x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
        best = _take(tl.reshape(_keys(x, ids), (K * GROUP,)), top_k, K)
        inside = rank < top_k
        temperature = tl.load(knobs_ptr)
        top_p = tl.load(knobs_ptr + 1)
        min_p = tl.load(knobs_ptr + 2)
        wide = _value(best).to(tl.float64)
        highest = tl.sum(tl.where(rank == 0, wide, 0.0), axis=0)
        odds = tl.exp((wide - highest) / temperature)
        rounded = (odds * MASS + 4503599627370496.0) - 4503599627370496.0  # 2^52: halves to even
        mass = tl.where(inside, rounded, 0.0).to(tl.int64)
        total = tl.cumsum(mass, axis=0)
        whole = tl.sum(mass, axis=0)
        by_top_p = inside & ((total - mass).to(tl.float64) < top_p * whole.to(tl.float64))
        by_min_p = inside & (odds >= min_p)
        kept = tl.minimum(
            tl.sum(by_top_p.to(tl.int32), axis=0), tl.sum(by_min_p.to(tl.int32), axis=0)
        )
        kept = tl.maximum(kept, 1)
        limit = tl.sum(tl.where(rank == kept - 1, total, 0), axis=0)
        uniform = tl.load(uniforms_ptr + drawn)
        target = tl.minimum((uniform * limit.to(tl.float64)).to(tl.int64), limit - 1)
        place = tl.sum((inside & (total <= target)).to(tl.int32), axis=0)
        place = tl.minimum(place, kept - 1)
        chosen = tl.sum(tl.where(rank == place, _id(best), 0), axis=0)
    tl.store(token_ptr, tl.minimum(tl.maximum(chosen, 0), V - 1))  # whatever the logits are
    tl.store(drawn_ptr, drawn + 1)
    tl.store(position_ptr, tl.load(position_ptr) + 1)


def choose(logits: Tensor, sampler: Sampler, token: Tensor, position: Tensor) -> None:
    """Put the next token into `token` and move on, without a host in between.

    Args:
        logits: [1, V] float32; columns from the sampler's vocabulary on are ignored.
        sampler: started for the request, with parameters that `can_choose` accepts.
        token: [1] int64, written.
        position: [1] int32, one is added.
    """
    params, V = sampler.params, sampler.vocabulary
    K = 1 if params.temperature == 0.0 else max(2, power_of_two(min(params.top_k, V)))
    group = BLOCK if K == 1 else GROUP
    programs = triton.cdiv(V, BLOCK)
    count = programs * (BLOCK // group)
    keys = torch.empty(count, dtype=torch.int64, device=logits.device)
    pdl = programmatic_launch(logits)
    run(
        _best_kernel,
        (programs,),
        logits,
        keys,
        V,
        GROUP=group,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    top_k = min(params.top_k, V)
    if K > 1:
        spans = triton.cdiv(count, SPAN)
        fewer = torch.empty(spans * top_k, dtype=torch.int64, device=logits.device)
        run(
            _best_groups_kernel,
            (spans,),
            keys,
            fewer,
            count,
            top_k,
            K=K,
            SPAN=SPAN,
            PDL=pdl,
            num_warps=1,
            launch_pdl=pdl,
        )
        keys, count = fewer, spans  # lists
    run(
        _choose_kernel,
        (1,),
        logits,
        keys,
        sampler.knobs,
        sampler.uniforms,
        sampler.drawn,
        position,
        token,
        count,
        V,
        top_k,
        K=K,
        KEYS=max(2, power_of_two(count)),
        GROUP=GROUP,
        MASS=2.0**MASS_BITS,
        PDL=pdl,
        num_warps=4 if K == 1 else 1,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )


@triton.jit
def _post_kernel(token_ptr, position_ptr, slots_ptr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(slots_ptr + tl.load(position_ptr) % 2, tl.load(token_ptr))


def post(token: Tensor, position: Tensor, slots: Tensor) -> None:
    """Leave a token where the host reads it; see `Ops.post`.

    A kernel that stores to the host's page-locked memory: a copy would be a step of its own in the
    stream, and take longer.
    """
    pdl = programmatic_launch(token)
    run(_post_kernel, (1,), token, position, slots, PDL=pdl, num_warps=1, launch_pdl=pdl)
