"""experts_order: a prompt's pairs of token and slot by expert, and blocks of pairs of one expert.

Layout  numbers [M, slots] of `experts_route` -> order [P] int64: token * slots + slot of each
        place; blocks [B, 3] int32: expert, first place, end
Plan    pairs are sorted by expert. There are as many blocks as any choice of experts can fill;
        which places a block has follows from where the experts end, so that nothing goes to the
        host. Blocks that are not needed have no places
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.kernels.launch.device import run


@triton.jit
def _experts_blocks_kernel(
    ends_ptr, blocks_ptr, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """EXPERTS_BLOCK: a power of two, EXPERTS or more."""
    block = tl.program_id(0)
    number = tl.arange(0, EXPERTS_BLOCK)
    end = tl.load(ends_ptr + number, mask=number < EXPERTS, other=0)
    start = tl.load(ends_ptr + number - 1, mask=(number > 0) & (number < EXPERTS), other=0)
    count = (end - start + ROWS - 1) // ROWS
    after = tl.cumsum(count, axis=0)  # the block after the last one of each expert
    own = (after > block) & (after - count <= block) & (number < EXPERTS)
    first = tl.sum(tl.where(own, start + (block - after + count) * ROWS, 0), axis=0)
    last = tl.minimum(tl.sum(tl.where(own, end, 0), axis=0), first + ROWS)
    tl.store(blocks_ptr + block * 3, tl.sum(tl.where(own, number, 0), axis=0))
    tl.store(blocks_ptr + block * 3 + 1, first)
    tl.store(blocks_ptr + block * 3 + 2, last)


def by_expert(numbers: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs of token and slot in the order of their experts.

    Args:
        numbers: [M, slots].

    Returns:
        [M * slots] int64, token * slots + slot of each place, and [experts] int32, the place at
        which the pairs of each expert end.
    """
    own, order = numbers.flatten().to(torch.int16).sort(stable=True)  # half the passes of int32
    every = torch.arange(experts, dtype=own.dtype, device=own.device)
    return order, torch.searchsorted(own, every, right=True, out_int32=True)


def blocks_of(order: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Expert, first place and end of every block: [blocks, 3] int32.

    Args:
        order: see `by_expert`, as `ends`.
        ends: at which the pairs of each expert end.
        rows: most places of a block.
    """
    pairs, experts = len(order), len(ends)
    count = min(pairs, pairs // rows + experts)
    blocks = torch.empty((count, 3), dtype=torch.int32, device=order.device)
    run(
        _experts_blocks_kernel,
        (count,),
        ends,
        blocks,
        EXPERTS=experts,
        EXPERTS_BLOCK=triton.next_power_of_2(experts),
        ROWS=rows,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return blocks
