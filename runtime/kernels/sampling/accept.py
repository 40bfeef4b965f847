"""accept: count the right drafts of a round, and write the inputs of the next round.

Layout  see `DecodeInputs`
Bytes   B * (k + 1) numbers of each tensor: next to nothing
Plan    A program per sequence, a lane per token. Drafts before the first that differs from the
        token chosen in its place are right. The next round begins with the token chosen behind the
        last of them, at its position and state. The host reads their number from page-locked
        memory. No atomics
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import power_of_two, programmatic_launch, run
from lowbit.runtime.kernels.sampling.row import RING, SCRATCH
from lowbit.runtime.state import decode_inputs
from lowbit.runtime.state.decode_inputs import DecodeInputs

HIDDEN_RING = tl.constexpr(decode_inputs.HIDDEN_RING)


@triton.jit
def _accept_kernel(
    ids_ptr, positions_ptr, rows_ptr, reads_ptr, writes_ptr, chosen_ptr, seen_ptr, ring_places_ptr,
    ends_ptr, wrong_ptr, right_ptr, k, R, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See `accept`; k: drafts of a sequence; LANES: a power of two above k."""
    b = tl.program_id(0)
    place = tl.arange(0, LANES)
    start = b * (k + 1)
    at = start + place
    row = tl.load(rows_ptr + start)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chosen = tl.load(chosen_ptr + at, mask=place <= k, other=-1)
    drafts = tl.load(ids_ptr + at + 1, mask=place < k, other=-2)
    right = tl.min(tl.where((place < k) & (chosen == drafts), LANES, place), axis=0)
    real = row != SCRATCH
    first = tl.load(positions_ptr + start) - real.to(tl.int32)  # choosing has moved it on
    end = tl.load(chosen_ptr + start + right)
    slot = tl.load(writes_ptr + start + right)
    tl.debug_barrier()  # all have read what is written now
    tl.store(right_ptr + (first % RING) * R + row, right.to(tl.int64))
    tl.store(seen_ptr + at, first + place, mask=place <= k)
    ring_place = row.to(tl.int64) * HIDDEN_RING + (first + place) % HIDDEN_RING
    tl.store(ring_places_ptr + at, ring_place, mask=place <= k)
    tl.store(ends_ptr + b, (start + right).to(tl.int64))
    tl.store(wrong_ptr + at, tl.where(place > right, row, SCRATCH), mask=place <= k)
    tl.store(reads_ptr + b, slot)
    tl.store(ids_ptr + start, end)
    next_first = tl.where(real, first + 1 + right, first)
    ahead = tl.where(real, place, 0)
    tl.store(positions_ptr + at, next_first + ahead, mask=place <= k)


def accept(inputs: DecodeInputs, B: int, k: int) -> None:
    """Find the drafts that were right and begin the next round behind them; see `Ops.accept`."""
    step = inputs.step
    pdl = programmatic_launch(step.ids)
    run(
        _accept_kernel,
        (B,),
        *(step.ids, step.positions, step.rows, step.reads, step.writes, inputs.chosen),
        *(inputs.seen, inputs.ring_places, inputs.ends, inputs.wrong, inputs.right),
        *(k, inputs.right.shape[1]),
        LANES=max(2, power_of_two(k + 1)),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
        enable_fp_fusion=True,  # where it is left out, Triton warns
    )
