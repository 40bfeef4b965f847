"""begin_blocks and place_drafts: the numbers that a round moves before drafts are made and behind.

Layout  see `BlockInputs` and `DecodeInputs`; drafts [B, k] int64
Bytes   some numbers of each token: next to nothing
Plan    A program per sequence, a lane per token. They stand for several small kernels of PyTorch,
        which neither begin before the kernel ahead has ended nor let the next one. No atomics
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import power_of_two, programmatic_launch, run
from lowbit.runtime.state.block_inputs import BlockInputs
from lowbit.runtime.state.decode_inputs import DecodeInputs


@triton.jit
def _begin_blocks_kernel(
    ids_ptr, positions_ptr, rows_ptr, block_ids_ptr, block_positions_ptr, block_rows_ptr,
    draft_positions_ptr, draft_rows_ptr, mask, k, made, size, LANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """See `begin_blocks`; LANES: a power of two, as many as a block has tokens."""
    b = tl.program_id(0)
    place = tl.arange(0, LANES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    id = tl.load(ids_ptr + b * (k + 1))
    position = tl.load(positions_ptr + b * (k + 1)) + place
    row = tl.load(rows_ptr + b * (k + 1)) + place * 0
    at = b * size + place
    tl.store(block_ids_ptr + at, tl.where(place == 0, id, mask), mask=place < size)
    tl.store(block_positions_ptr + at, position, mask=place < size)
    tl.store(block_rows_ptr + at, row, mask=place < size)
    tl.store(draft_positions_ptr + b * made + place, position, mask=place < made)
    tl.store(draft_rows_ptr + b * made + place, row, mask=place < made)


@triton.jit
def _place_drafts_kernel(
    drafts_ptr, ids_ptr, stride_b, stride_k, made, k, LANES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """See `place_drafts`; made: drafts of a sequence; LANES: a power of two, as many as k."""
    b = tl.program_id(0)
    place = tl.arange(0, LANES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    draft = tl.load(drafts_ptr + b * stride_b + place * stride_k, mask=place < made, other=0)
    tl.store(ids_ptr + b * (k + 1) + 1 + place, draft.to(tl.int32), mask=place < k)


def begin_blocks(inputs: DecodeInputs, blocks: BlockInputs, B: int, k: int, made: int) -> None:
    """Write the inputs of blocks behind the last tokens of a round; see `DraftOps.begin_blocks`."""
    step = inputs.step
    pdl = programmatic_launch(step.ids)
    run(
        _begin_blocks_kernel,
        (B,),
        *(step.ids, step.positions, step.rows, blocks.ids, blocks.positions, blocks.rows),
        *(blocks.draft_positions, blocks.draft_rows, blocks.mask, k, made, blocks.size),
        LANES=max(2, power_of_two(blocks.size)),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
        enable_fp_fusion=True,  # where it is left out, Triton warns
    )


def place_drafts(inputs: DecodeInputs, drafts: Tensor, B: int, k: int) -> None:
    """Put drafts behind the last tokens of a round; see `Ops.place_drafts`."""
    ids = inputs.step.ids
    pdl = programmatic_launch(ids)
    run(
        _place_drafts_kernel,
        (B,),
        *(drafts, ids, *drafts.stride(), drafts.shape[1], k),
        LANES=max(2, power_of_two(k)),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
