"""experts_route: the experts of every token and their shares.

    numbers[b, :k] = the k likeliest experts of token b, of equal ones those of lower number first
    shares[b, :k]  = softmax of their scores, or their shares in the softmax of all scores; a shared
                     expert follows with the sigmoid of its own

Layout  scores [M, experts] fp32 -> numbers [M, slots] int32, shares [M, slots] fp32
Plan    a program, which is one warp, takes a token
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.experts.choice import expert_of, likeliest, scores_of, shares
from lowbit.runtime.kernels.experts.program import choice_of
from lowbit.runtime.kernels.launch.device import programmatic_launch, run
from lowbit.runtime.kernels.linear.tiles import GpuLinear
from lowbit.runtime.kernels.ptx.mma import threads
from lowbit.runtime.weights.linear import ExpertWeights


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of some tokens."""

    numbers: Tensor  # [M, slots] int32; a shared expert, the last, has the last slot
    shares: Tensor  # [M, slots] float32, weights of their outputs


@gluon.jit
def _experts_route_kernel(
    scores_ptr, numbers_ptr, shares_ptr, CHOICE: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    SLOTS: gl.constexpr = CHOICE.SLOTS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _, lane, zero, _ = threads(1)
    token = gl.program_id(0)
    scores = scores_of(scores_ptr, token, zero, CHOICE)
    numbers, found = likeliest(scores, lane, CHOICE)
    share = shares(scores, found, lane, CHOICE)
    own = share[0]
    for slot in gl.static_range(1, SLOTS):
        own = gl.where(lane == slot, share[slot], own)
    at = token * SLOTS + lane
    number = expert_of(lane, numbers, CHOICE)
    gl.store(numbers_ptr + at, number, mask=lane < SLOTS)
    gl.store(shares_ptr + at, own, mask=lane < SLOTS)


def experts_route(scores: Tensor, experts: ExpertWeights[GpuLinear]) -> Routes:
    """Experts of every token.

    Args:
        scores: [M, experts] float32, of the router.

    Returns:
        Numbers and shares; slots are at most 32.
    """
    M, choice = len(scores), choice_of(experts)
    slots = choice.SLOTS
    numbers = torch.empty((M, slots), dtype=torch.int32, device=scores.device)
    found = torch.empty((M, slots), dtype=torch.float32, device=scores.device)
    pdl = programmatic_launch(scores)
    run(
        _experts_route_kernel,
        (M,),
        scores,
        numbers,
        found,
        CHOICE=choice,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return Routes(numbers, found)
