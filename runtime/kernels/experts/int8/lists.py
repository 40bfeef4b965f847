"""experts_lists: pairs of token and slot by expert, and blocks of pairs of one expert.

Layout  numbers [M, slots] int32 of `experts_route` -> order [M * slots] int32: token * slots + slot
        of each place; blocks [B, 3] int32: expert, first place, end
Plan    a program counts the pairs of the experts before its own, and puts its own pairs behind
        them, in their order. Its first block has the number `places before // rows + expert`: so
        no two programs name the same block, and at most one block of each expert has no places.
        Nothing is sorted, and nothing goes to the host. It runs beside the kernel before it: where
        it starts, all programs of that one have waited for the routes. Memory has little to do
        meanwhile: on Hopper programs bring weights of the experts whose blocks come first to L2
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import (
    card_of,
    power_of_two,
    programmatic_launch,
    run,
)

MOST_PAIRS = 2048  # that a program compares at a time
AHEAD_BYTES = 32 << 20  # of weights that are brought to L2
PIECES = tl.constexpr(128)  # of a program's part of them


@triton.jit(do_not_specialize=["pairs"])
def _experts_lists_kernel(
    numbers_ptr, order_ptr, blocks_ptr, words_ptr, pairs, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SHARERS: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK: pairs that are compared at a time, a power of two.

    SHARERS: programs that bring the weights of one expert, PIECES of so many bytes each.
    """
    expert = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    before = 0
    end = 0
    wanted = 0
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        number = tl.load(numbers_ptr + pair, mask=pair < pairs, other=1 << 30)
        before += tl.sum((number < expert).to(tl.int32), axis=0)
        end += tl.sum((number <= expert).to(tl.int32), axis=0)
        if PIECE > 0:
            wanted += tl.sum((number == expert // SHARERS).to(tl.int32), axis=0)
    if PIECE > 0:  # noqa: SIM102 - other cards do not compile what follows
        if wanted > 0:
            part = words_ptr.to(tl.int64, bitcast=True) + expert.to(tl.int64) * (PIECES * PIECE)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
                "=r,l,r",
                [part + tl.arange(0, PIECES) * PIECE, PIECE],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
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
    if PDL:
        gdc_wait()


def experts_lists(numbers: Tensor, words: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their experts, and the blocks that read an expert together.

    Args:
        numbers: [M, slots] int32, experts of every token.
        words: of the experts' weights that are read next, [experts, ...].
        rows: most places of a block.

    Returns:
        [M * slots] int32, token * slots + slot of each place; [blocks, 3] int32, expert, first
        place and end of each block. Where these are equal the block has no places.
    """
    pairs, experts, pdl = numbers.numel(), len(words), programmatic_launch(numbers)
    sharers = power_of_two(max(1, words.nbytes // AHEAD_BYTES))
    piece, rest = divmod(words.nbytes // experts, sharers * PIECES.value)
    if rest or piece % 16 or not card_of(numbers).is_hopper:
        piece = 0
    order = torch.empty(pairs, dtype=torch.int32, device=numbers.device)
    blocks = torch.empty((pairs // rows + experts, 3), dtype=torch.int32, device=numbers.device)
    run(
        _experts_lists_kernel,
        (experts,),
        numbers,
        order,
        blocks,
        words,
        pairs,
        ROWS=rows,
        BLOCK=min(power_of_two(pairs), MOST_PAIRS),
        SHARERS=sharers,
        PIECE=piece,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return order, blocks
