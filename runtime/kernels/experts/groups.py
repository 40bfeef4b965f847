"""experts_groups: pairs of token and slot with the same expert, GROUP of them at a time.

Layout  numbers [M, slots] int32 of `experts_route` -> groups [M * slots, GROUP] int32
Plan    a program counts the pairs of its pair's expert before it. Every GROUP-th of them begins a
        group and names its pairs, the others name none; so nothing is sorted, and nothing goes to
        the host
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import power_of_two, programmatic_launch, run
from lowbit.runtime.kernels.launch.experts import GROUP


@triton.jit
def _experts_groups_kernel(
    numbers_ptr, groups_ptr, pairs, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """BLOCK: a power of two, `pairs` or more."""
    own = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number = tl.load(numbers_ptr + pair, mask=pair < pairs, other=-1)
    same = number == tl.load(numbers_ptr + own)
    place = tl.cumsum(same.to(tl.int32), axis=0) - 1  # among the pairs of the expert
    first = tl.sum(tl.where(pair == own, place, 0), axis=0)
    for i in tl.static_range(GROUP):
        member = tl.max(tl.where(same & (place == first + i), pair, -1), axis=0)
        tl.store(groups_ptr + own * GROUP + i, tl.where(first % GROUP == 0, member, -1))


def groups_of(numbers: Tensor) -> Tensor:
    """The pairs that read an expert together, in their order.

    Args:
        numbers: [M, slots] int32, experts of every token.

    Returns:
        [M * slots, GROUP] int32: for each pair the group that it begins, token * slots + slot of
        its members, -1 after the last; -1 everywhere if it begins none.
    """
    pairs, pdl = numbers.numel(), programmatic_launch(numbers)
    groups = torch.empty((pairs, GROUP), dtype=torch.int32, device=numbers.device)
    run(
        _experts_groups_kernel,
        (pairs,),
        numbers,
        groups,
        pairs,
        GROUP=GROUP,
        BLOCK=power_of_two(pairs),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return groups
