"""adjust: logits of several rows after mask, bias and penalties, as `cpu_sampling.adjusted`.

Layout  logits [M, V or more] fp32 -> [M, V rounded up] fp32
Bytes   per row 8 * V; with penalties 5 * V more, with a mask V / 8 more. V = 151936: 1.2 and 0.8 MB
        from L2, 0.02 MB from the host's memory
Plan    A program per block of 1024 logits of a row, in float64, rounded once. A row's biases are
        sorted by id, so a program finds those of its block by counting. No atomics
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.formats.sampling_ranges import MOST_BIASES
from lowbit.runtime.kernels.launch.device import programmatic_launch, run
from lowbit.runtime.kernels.sampling.keys import BLOCK
from lowbit.runtime.kernels.sampling.row import KNOBS, WHOLE
from lowbit.runtime.state import sampler as sampler_module
from lowbit.runtime.state.sampler import SamplerRows

WIDTH = tl.constexpr(MOST_BIASES)
REPETITION = tl.constexpr(sampler_module.REPETITION)
PRESENCE = tl.constexpr(sampler_module.PRESENCE)
FREQUENCY = tl.constexpr(sampler_module.FREQUENCY)
BIASES = tl.constexpr(sampler_module.BIASES)
MASKED = tl.constexpr(sampler_module.MASKED)


@triton.jit
def _biased(wide, ids, start, ids_ptr, values_ptr, count):
    """Logits [BLOCK] of the tokens from `start` on, with the row's `count` biases added."""
    places = tl.arange(0, 512)
    biased = tl.load(ids_ptr + places, mask=places < count, other=0x7FFFFFFF)
    first = tl.sum((biased < start).to(tl.int32), axis=0)
    last = tl.sum((biased < start + BLOCK).to(tl.int32), axis=0)
    for i in range(first, last):
        wide = tl.where(ids == tl.load(ids_ptr + i), wide + tl.load(values_ptr + i), wide)
    return wide


@triton.jit
def _adjust_kernel(
    logits_ptr, out_ptr, rows_ptr, masks_ptr, knobs_ptr, whole_ptr, seen_ptr, counts_ptr,
    bias_ids_ptr, bias_ptr, mask_ptr, stride, out_stride, V, PDL: tl.constexpr,
):  # fmt: skip
    """See `adjust`; whole_ptr: whole numbers of the rows, knobs_ptr: the others."""
    start = tl.program_id(0) * BLOCK
    m = tl.program_id(1).to(tl.int64)
    ids = start + tl.arange(0, BLOCK)
    inside = ids < V
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows_ptr + m).to(tl.int64)
    wide = tl.load(logits_ptr + m * stride + ids, mask=inside, other=0.0).to(tl.float64)
    repetition = tl.load(knobs_ptr + row * KNOBS + REPETITION)
    presence = tl.load(knobs_ptr + row * KNOBS + PRESENCE)
    frequency = tl.load(knobs_ptr + row * KNOBS + FREQUENCY)
    biases = tl.load(whole_ptr + row * WHOLE + BIASES)
    if tl.load(whole_ptr + row * WHOLE + MASKED) != 0:
        used = tl.load(masks_ptr + m).to(tl.int64)
        words = tl.load(mask_ptr + used * ((V + 31) // 32) + ids // 32, mask=inside, other=0)
        wide = tl.where(((words >> (ids % 32)) & 1) != 0, wide, float("-inf"))
    if biases > 0:
        at = row * WIDTH
        wide = _biased(wide, ids, start, bias_ids_ptr + at, bias_ptr + at, biases)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        count = tl.load(counts_ptr + row * V + ids, mask=inside, other=0)
        if repetition != 1.0:
            seen = tl.load(seen_ptr + row * V + ids, mask=inside, other=0) != 0
            weaker = tl.where(wide < 0, wide * repetition, wide / repetition)
            wide = tl.where(seen | (count > 0), weaker, wide)
        wide = wide - count.to(tl.float64) * frequency
        wide = wide - tl.where(count > 0, presence, 0.0)
    tl.store(out_ptr + m * out_stride + ids, wide.to(tl.float32), mask=inside)


def adjust(
    logits: Tensor, sampler: SamplerRows, rows: Tensor, masks: Tensor | None = None
) -> Tensor:
    """Logits after mask, bias and penalties; columns from V on are not written.

    Args:
        logits: [M, V or more] float32.
        sampler: of R rows.
        rows: [M] int32, row of each line of logits.
        masks: [M] int32, mask of each line if its row is masked; None for those of the rows.

    Returns:
        [M, V rounded up] float32.
    """
    M, V = logits.shape[0], sampler.vocabulary
    wide = -(-V // 16) * 16  # every line is aligned
    out = torch.empty((M, wide), dtype=torch.float32, device=logits.device)
    pdl = programmatic_launch(logits)
    run(
        _adjust_kernel,
        (triton.cdiv(V, BLOCK.value), M),
        *(logits, out, rows, rows if masks is None else masks),
        *(sampler.knobs, sampler.whole, sampler.seen, sampler.counts),
        *(sampler.bias_ids, sampler.bias, sampler.mask),
        *(logits.stride(0), wide, V),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return out
