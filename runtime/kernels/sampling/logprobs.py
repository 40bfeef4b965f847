"""logprobs: log-probabilities of several rows, as `cpu_sampling.log_probabilities` has them.

Layout  logits [M, V or more] fp32, token [M] int64 -> ids and values [2, R, N + 1] on the host
Bytes   8 * V a row; V = 151936: 1.2 MB, from L2
Plan    A program per block of 1024 logits leaves the largest and the sum of exponentials relative
        to it in FP32; one program a row joins them in FP64, in one order whatever M is. The N
        likeliest tokens lie in the N groups of 64 logits whose best logits are highest. No atomics
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.formats.sampling_ranges import MOST_LOGPROBS
from lowbit.runtime.kernels.launch.device import power_of_two, programmatic_launch, run
from lowbit.runtime.kernels.sampling.choose import best_rows
from lowbit.runtime.kernels.sampling.keys import BLOCK, GROUP, LOWEST, keys_of
from lowbit.runtime.kernels.sampling.row import RING
from lowbit.runtime.state.host_rings import LogProbabilities

COUNT = tl.constexpr(MOST_LOGPROBS)
WIDTH = tl.constexpr(MOST_LOGPROBS + 1)  # the chosen token, then the likeliest


@triton.jit
def _exp_sums_kernel(logits_ptr, largest_ptr, sums_ptr, stride, V, PDL: tl.constexpr):
    """The largest logit of a block of a row, and the sum of exponentials relative to it."""
    m = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits_ptr + m * stride + ids, mask=ids < V, other=float("-inf"))
    largest = tl.max(x, axis=0)
    # NaN of minus infinity less itself counts as 0; a NaN logit makes the sum NaN
    odds = tl.where(x == float("-inf"), 0.0, tl.exp(x - largest))
    at = m * tl.num_programs(0) + tl.program_id(0)
    tl.store(largest_ptr + at, largest)
    tl.store(sums_ptr + at, tl.sum(odds, axis=0))


@triton.jit
def _log_probabilities_kernel(
    logits_ptr, largest_ptr, sums_ptr, best_ptr, token_ptr, rows_ptr, positions_ptr, ids_ptr,
    values_ptr, stride, blocks, V, R, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Log-probabilities of a row's token and of its COUNT likeliest; BLOCKS: a power of two."""
    m = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    at = tl.arange(0, 32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    inside = block < blocks
    each = tl.load(largest_ptr + m * blocks + block, mask=inside, other=float("-inf"))
    sums = tl.load(sums_ptr + m * blocks + block, mask=inside, other=0.0)
    largest = tl.max(each, axis=0).to(tl.float64)
    shares = tl.exp(each.to(tl.float64) - largest)
    shares = tl.where(each == float("-inf"), 0.0, shares * sums.to(tl.float64))
    whole = largest + tl.log(tl.sum(shares, axis=0))
    known = (at > 0) & (at <= COUNT)
    id = tl.load(best_ptr + m * COUNT + at - 1, mask=known, other=-1)
    id = tl.where(at == 0, tl.load(token_ptr + m), id)
    exists = (id >= 0) & (id < V)
    x = tl.load(logits_ptr + m * stride + id, mask=exists, other=float("-inf"))
    value = tl.where(exists, x.to(tl.float64) - whole, float("-inf"))
    row = tl.load(rows_ptr + m)
    place = (tl.load(positions_ptr + m) % RING) * R + row
    tl.store(ids_ptr + place * WIDTH + at, tl.where(exists, id, -1), mask=at < WIDTH)
    tl.store(values_ptr + place * WIDTH + at, value.to(tl.float32), mask=at < WIDTH)


def log_probabilities(
    logits: Tensor,
    vocabulary: int,
    rows: Tensor,
    positions: Tensor,
    token: Tensor,
    out: LogProbabilities,
) -> None:
    """Leave log-probabilities where the host reads them; see `Ops.log_probabilities`."""
    M, V = logits.shape[0], vocabulary
    best = likeliest(logits, V, MOST_LOGPROBS)
    blocks, stride = triton.cdiv(V, BLOCK.value), logits.stride(0)
    largest = torch.empty((M, blocks), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(largest)
    pdl = programmatic_launch(logits)
    options = {"PDL": pdl, "num_warps": 4, "launch_pdl": pdl, "enable_fp_fusion": False}
    run(_exp_sums_kernel, (blocks, M), logits, largest, sums, stride, V, **options)
    run(
        _log_probabilities_kernel,
        (M,),
        *(logits, largest, sums, best, token, rows, positions, out.ids, out.values),
        *(stride, blocks, V, out.ids.shape[1]),
        BLOCKS=max(2, power_of_two(blocks)),
        **options,
    )


def likeliest(logits: Tensor, V: int, count: int) -> Tensor:
    """Ids of the likeliest tokens from the first down, of equals the lowest first.

    Args:
        logits: [M, V or more] float32.
        V: real tokens.
        count: of ids, at most the logits of a block.

    Returns:
        [M, count] int64; V or above past the end of the vocabulary.
    """
    size = GROUP.value
    groups, _ = best_rows(logits, V, size)
    groups = groups.topk(min(count, groups.shape[1]), dim=1).values
    first = (0x7FFFFFFF - (groups & 0x7FFFFFFF)) // size * size
    ids = (first[:, :, None] + torch.arange(size, device=logits.device)).flatten(1)
    scores = logits.gather(1, ids.clamp(max=V - 1))
    best = keys_of(scores, ids).masked_fill(ids >= V, LOWEST.value).topk(count, dim=1).values
    return 0x7FFFFFFF - (best & 0x7FFFFFFF)
