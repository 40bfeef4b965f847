"""join_copies: put copied tokens in the place of a round's drafts.

Layout  see `DraftOps.join_copies`
Bytes   B * (2 * k + 4) numbers: next to nothing
Plan    A program per sequence, a lane per token of the round. All lanes see whether the copy holds,
        and write its tokens if so. The host reads whether it did from page-locked memory. No
        atomics
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import power_of_two, programmatic_launch, run
from lowbit.runtime.kernels.sampling.row import RING
from lowbit.runtime.state.decode_inputs import DecodeInputs


@triton.jit
def _join_copies_kernel(
    ids_ptr, positions_ptr, rows_ptr, copies_ptr, copied_ptr, k, R, N: tl.constexpr,
    LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See `join_copies`; k: drafts of a sequence; LANES: a power of two above k."""
    b = tl.program_id(0)
    place = tl.arange(0, LANES)
    copies_ptr += b * (2 + N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.load(positions_ptr + b * (k + 1))
    row = tl.load(rows_ptr + b * (k + 1))
    start, agreeing = tl.load(copies_ptr), tl.load(copies_ptr + 1)
    behind = first + 1 - start  # copied tokens up to the last one of the sequence
    at = behind - 1 + place
    ids = tl.load(ids_ptr + b * (k + 1) + place, mask=place <= k, other=-1)
    some = tl.load(copies_ptr + 2 + at, mask=(at >= 0) & (at < N), other=-2)
    needed = ((place == 0) & (behind > 0)) | ((place > 0) & (place <= agreeing))
    wrong = tl.sum((needed & (place <= k) & (some != ids)).to(tl.int32), axis=0)
    holds = (start > 0) & (behind >= 0) & (behind + k <= N) & (wrong == 0)
    joined = tl.where(holds, some, ids)
    tl.store(ids_ptr + b * (k + 1) + place, joined, mask=(place > 0) & (place <= k))
    tl.store(copied_ptr + (first % RING) * R + row, holds.to(tl.int64))


def join_copies(inputs: DecodeInputs, copies: Tensor, copied: Tensor, B: int, k: int) -> None:
    """Put copied tokens in the place of drafts; see `DraftOps.join_copies`."""
    step = inputs.step
    pdl = programmatic_launch(step.ids)
    run(
        _join_copies_kernel,
        (B,),
        *(step.ids, step.positions, step.rows, copies, copied, k, copied.shape[1]),
        N=copies.shape[1] - 2,
        LANES=max(2, power_of_two(k + 1)),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
        enable_fp_fusion=True,  # where it is left out, Triton warns
    )
