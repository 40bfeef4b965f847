"""experts_route: the experts of every token of a prompt and their shares, and tokens by expert.

    numbers[b, :k] = the k likeliest experts of token b, of equal ones those of lower number first
    shares[b, :k]  = softmax of their scores; a shared expert follows with the sigmoid of its own

Layout  scores [M, experts] fp32 -> numbers [M, slots] int16, shares [M, slots] fp32
Plan    a program takes a token. Pairs of token and slot are then sorted by expert, and blocks of
        rows of one expert are found from where the experts end: so nothing goes to the host
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.kernels.device import run


@triton.jit
def _experts_route_kernel(
    scores_ptr, numbers_ptr, shares_ptr,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK: a power of two, EXPERTS or more; SLOTS: CHOSEN, and one of a shared expert."""
    token = tl.program_id(0).to(tl.int64)
    LOWEST: tl.constexpr = -(1 << 31)
    number = tl.arange(0, BLOCK)
    slot = tl.arange(0, 32)
    scores = scores_ptr + token * (EXPERTS + SLOTS - CHOSEN)
    score = tl.load(scores + number, mask=number < EXPERTS, other=0.0) + 0.0  # one zero
    word = score.to(tl.int32, bitcast=True)
    key = tl.where(number < EXPERTS, word ^ ((word >> 31) & 0x7FFFFFFF), LOWEST)
    found = tl.full([32], 0, tl.int32)
    likely = tl.full([32], 0.0, tl.float32)
    first = 0.0
    for i in tl.static_range(CHOSEN):
        best = tl.max(key, axis=0)
        expert = tl.min(tl.where(key == best, number, BLOCK), axis=0)
        expert = tl.minimum(expert, EXPERTS - 1)
        key = tl.where(number == expert, LOWEST, key)
        own = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        if i == 0:
            first = own
        found = tl.where(slot == i, expert, found)
        likely = tl.where(slot == i, tl.exp(own - first), likely)
    share = likely / tl.sum(likely, axis=0)
    if SLOTS > CHOSEN:
        gate = tl.sigmoid(tl.load(scores + EXPERTS))
        found = tl.where(slot == CHOSEN, EXPERTS, found)
        share = tl.where(slot == CHOSEN, gate, share)
    at = token * SLOTS + slot
    tl.store(numbers_ptr + at, found.to(tl.int16), mask=slot < SLOTS)
    tl.store(shares_ptr + at, share, mask=slot < SLOTS)


def experts_route(scores: Tensor, chosen: int, shared: bool) -> tuple[Tensor, Tensor]:
    """Experts of every token.

    Args:
        scores: [M, experts] float32, of the router.
        chosen: experts of a token, beside the shared one; at most 31.
        shared: the last expert is every token's.

    Returns:
        [M, slots] int16, numbers, and [M, slots] float32, shares.
    """
    M, experts = scores.shape
    slots = chosen + shared
    numbers = torch.empty((M, slots), dtype=torch.int16, device=scores.device)
    shares = torch.empty((M, slots), dtype=torch.float32, device=scores.device)
    run(
        _experts_route_kernel,
        (M,),
        scores,
        numbers,
        shares,
        EXPERTS=experts - shared,
        CHOSEN=chosen,
        SLOTS=slots,
        BLOCK=triton.next_power_of_2(experts - shared),
        num_warps=1,
        enable_fp_fusion=True,
    )
    return numbers, shares


def by_expert(numbers: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs of token and slot in the order of their experts.

    Args:
        numbers: [M, slots] int16.
        experts: how many there are.

    Returns:
        [M * slots] int64, token * slots + slot of each place, and [experts] int32, the place at
        which the pairs of each expert end.
    """
    own, order = numbers.flatten().sort(stable=True)
    every = torch.arange(experts, dtype=own.dtype, device=own.device)
    return order, torch.searchsorted(own, every, right=True, out_int32=True)


@triton.jit
def place_of(block, ends_ptr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Expert, first place and end of the places of a block of up to ROWS places of one expert.

    Past the last block place and end are equal. BLOCK: a power of two, EXPERTS or more.
    """
    number = tl.arange(0, BLOCK)
    end = tl.load(ends_ptr + number, mask=number < EXPERTS, other=0)
    start = tl.load(ends_ptr + number - 1, mask=(number > 0) & (number < EXPERTS), other=0)
    blocks = (end - start + ROWS - 1) // ROWS
    last = tl.cumsum(blocks, axis=0)
    own = (last > block) & (last - blocks <= block) & (number < EXPERTS)
    expert = tl.sum(tl.where(own, number, 0), axis=0)
    first = tl.sum(tl.where(own, start + (block - last + blocks) * ROWS, 0), axis=0)
    return expert, first, tl.sum(tl.where(own, end, 0), axis=0)
