"""choose: the next token of one sequence, as `lowbit.runtime.state.sampling.sample` chooses it.

Layout  logits [1, V] fp32 -> token [1] int64, slots [2] int64 on the host; position and the
        sampler's counter move on by one. The slot gets -1 where the largest logit is not finite
Bytes   4*V; V = 151936: 0.6 MB, from L2
Plan    a program per block of the vocabulary keeps the best logit of each group as a sortable key,
        value before id. The likeliest token has one group a block, and one program takes the best
        of all; one that is drawn goes on in `draw`. Either also leaves the token where the host
        reads it, which saves a kernel. No atomics
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.device import programmatic_launch, run
from lowbit.runtime.kernels.draw import BLOCK, GROUP, LOWEST, MOST, draw
from lowbit.runtime.kernels.launch import power_of_two
from lowbit.runtime.state.sampling import Sampler, SamplingParams


def can_choose(params: SamplingParams) -> bool:
    """Whether the kernels cover the parameters: greedy, or few candidates; no penalties."""
    return not params.penalized and (params.temperature == 0.0 or 0 < params.top_k <= MOST)


@triton.jit
def _best_kernel(
    logits_ptr, keys_ptr, V, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # a key as in `draw`, which is Gluon
    ordered = tl.where(x != x, 0x7FFFFFFF, ordered)  # NaN above all, whatever its sign
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    groups: tl.constexpr = BLOCK // GROUP
    best = tl.max(tl.reshape(keys, (groups, GROUP)), axis=1)
    tl.store(keys_ptr + tl.program_id(0) * groups + tl.arange(0, groups), best)


@triton.jit
def _likeliest_kernel(
    keys_ptr,
    drawn_ptr,
    position_ptr,
    token_ptr,
    slots_ptr,
    count,
    V,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.arange(0, KEYS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.load(position_ptr) + 1
    drawn = tl.load(drawn_ptr) + 1
    best = tl.max(tl.load(keys_ptr + at, mask=at < count, other=LOWEST), axis=0)
    token = tl.minimum(0x7FFFFFFF - (best & 0x7FFFFFFF), V - 1)  # whatever the logits are
    high = (best >> 32).to(tl.int32)
    largest = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
    finite = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(slots_ptr + position % 2, tl.where(finite, token, -1))
    tl.store(token_ptr, token)
    tl.store(drawn_ptr, drawn)
    tl.store(position_ptr, position)


def choose(
    logits: Tensor, sampler: Sampler, token: Tensor, position: Tensor, slots: Tensor
) -> None:
    """Put the next token into `token` and move on, without a host in between.

    Args:
        logits: [1, V] float32; columns from the sampler's vocabulary on are ignored.
        sampler: started for the request, with parameters that `can_choose` accepts.
        token: [1] int64, written.
        position: [1] int32, one is added.
        slots: [2] int64, see `post`; the token goes to that of the new position, or -1 where the
            largest logit is not finite.
    """
    V, greedy = sampler.vocabulary, sampler.params.temperature == 0.0
    group = BLOCK if greedy else GROUP
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
        enable_fp_fusion=True,
    )
    if not greedy:
        draw(logits, keys, sampler, token, position, slots)
        return
    run(
        _likeliest_kernel,
        (1,),
        keys,
        sampler.drawn,
        position,
        token,
        slots,
        count,
        V,
        KEYS=max(2, power_of_two(count)),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )


@triton.jit
def _post_kernel(token_ptr, nonfinite_ptr, position_ptr, slots_ptr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    posted = tl.load(token_ptr) | tl.load(nonfinite_ptr)
    tl.store(slots_ptr + tl.load(position_ptr) % 2, posted)


def post(token: Tensor, nonfinite: Tensor, position: Tensor, slots: Tensor) -> None:
    """Leave a token, or -1, where the host reads it; see `Ops.post`.

    A kernel that stores to the host's page-locked memory: a copy would be a step of its own in the
    stream, and take longer.
    """
    pdl = programmatic_launch(token)
    run(
        _post_kernel,
        (1,),
        token,
        nonfinite,
        position,
        slots,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
