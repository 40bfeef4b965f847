"""experts_lists: pairs of token and slot by expert, and blocks of pairs of one expert.

Layout  numbers [M, slots] int32 of `experts_route` -> order [M * slots] int32: token * slots + slot
        of each place; blocks [B, 3] int32: expert, first place, end
Plan    a program counts the pairs of the experts before its own, and puts its own pairs behind
        them, in their order. Its first block has the number `places before // rows + expert`: so
        no two programs name the same block, and at most one block of each expert has no places.
        Nothing is sorted, and nothing goes to the host
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import power_of_two, programmatic_launch, run

MOST_PAIRS = 2048  # that a program compares at a time


@triton.jit(do_not_specialize=["pairs"])
def _experts_lists_kernel(
    numbers_ptr, order_ptr, blocks_ptr, pairs,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK: pairs that are compared at a time, a power of two."""
    expert = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    before = 0
    end = 0
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        number = tl.load(numbers_ptr + pair, mask=pair < pairs, other=1 << 30)
        before += tl.sum((number < expert).to(tl.int32), axis=0)
        end += tl.sum((number <= expert).to(tl.int32), axis=0)
    place = before
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        same = tl.load(numbers_ptr + pair, mask=pair < pairs, other=1 << 30) == expert
        own = place + tl.cumsum(same.to(tl.int32), axis=0) - 1
        tl.store(order_ptr + own, pair, mask=same)
        place += tl.sum(same.to(tl.int32), axis=0)
    block = before // ROWS + expert
    for i in range(0, end // ROWS - before // ROWS + 1):
        tl.store(blocks_ptr + (block + i) * 3, expert)
        tl.store(blocks_ptr + (block + i) * 3 + 1, tl.minimum(before + i * ROWS, end))
        tl.store(blocks_ptr + (block + i) * 3 + 2, tl.minimum(before + i * ROWS + ROWS, end))


def lists_of(numbers: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their experts, and the blocks that read an expert together.

    Args:
        numbers: [M, slots] int32, experts of every token.
        experts: how many there are.
        rows: most places of a block.

    Returns:
        [M * slots] int32, token * slots + slot of each place; [blocks, 3] int32, expert, first
        place and end of each block. Where these are equal the block has no places.
    """
    pairs, pdl = numbers.numel(), programmatic_launch(numbers)
    order = torch.empty(pairs, dtype=torch.int32, device=numbers.device)
    blocks = torch.empty((pairs // rows + experts, 3), dtype=torch.int32, device=numbers.device)
    run(
        _experts_lists_kernel,
        (experts,),
        numbers,
        order,
        blocks,
        pairs,
        ROWS=rows,
        BLOCK=min(power_of_two(pairs), MOST_PAIRS),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return order, blocks
