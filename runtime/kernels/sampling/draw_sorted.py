"""draw_sorted: draw a token of each row among any number, as `cpu_sampling.drawn` draws it.

Layout  logits [M, V or more] fp32 -> token [M] int64, ring [RING, R] int64 on the host
Bytes   those of PyTorch's sort, and 4 * V a row; V = 151936: 0.6 MB, from L2
Plan    PyTorch sorts. A program per block of 1024 sorted logits of a row adds up their masses. Then
        one program a row finds how many tokens pass top-p, the mass of those that pass all filters,
        and the token that the random number meets in it: each from the sums of all blocks and the
        masses of one. No atomics
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import power_of_two, programmatic_launch, run
from lowbit.runtime.kernels.sampling.keys import BLOCK
from lowbit.runtime.kernels.sampling.row import (
    add,
    draw_parameters,
    rounded_masses,
    settle,
    uniform,
)
from lowbit.runtime.state.sampler import SamplerRows


@triton.jit
def _limits(temperature, top_k, V):
    """Temperature and number of tokens that pass top-k; 1 and 1 where the temperature is 0."""
    top_k = tl.where((top_k == 0) | (top_k > V), V, top_k)
    top_k = tl.where(temperature == 0.0, 1, top_k)
    return tl.where(temperature == 0.0, 1.0, temperature), top_k.to(tl.int32)


@triton.jit
def _masses(sorted_ptr, block, highest, temperature, top_k):
    """Places of a block, the odds of their tokens, and masses, 0 past top_k."""
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < top_k
    x = tl.load(sorted_ptr + place, mask=inside, other=float("-inf"))
    odds = tl.exp((x.to(tl.float64) - highest) / temperature)
    rounded = rounded_masses(odds)
    # NaN, of logits that are not finite, becomes 0
    return place, odds, tl.where(inside & (rounded >= 0.0), rounded, 0.0).to(tl.int64)


@triton.jit
def _sum_masses_kernel(
    sorted_ptr, sums_ptr, passed_ptr, rows_ptr, knobs_ptr, whole_ptr, V, PDL: tl.constexpr
):  # fmt: skip
    """Add up the masses of a block of a row, and count its tokens that pass top-k and min-p."""
    m = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows_ptr + m).to(tl.int64)
    temperature, _, min_p, top_k, _ = draw_parameters(row, knobs_ptr, whole_ptr)
    temperature, top_k = _limits(temperature, top_k, V)
    highest = tl.load(sorted_ptr + m * V).to(tl.float64)
    line = sorted_ptr + m * V
    place, odds, mass = _masses(line, tl.program_id(0), highest, temperature, top_k)
    passed = (place < top_k) & (odds >= min_p)
    at = m * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums_ptr + at, tl.sum(mass, axis=0))
    tl.store(passed_ptr + at, tl.sum(passed.to(tl.int32), axis=0))


@triton.jit
def _pick_kernel(
    sorted_ptr, ids_ptr, sums_ptr, passed_ptr, rows_ptr, knobs_ptr, whole_ptr, positions_ptr,
    token_ptr, ring_ptr, counts_ptr, tokens_ptr, V, R, BLOCKS: tl.constexpr, COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Draw a row's token from the sums of its blocks, and settle it; BLOCKS: a power of two.

    ids_ptr: columns in the order of their logits; tokens_ptr: see `settle`.
    """
    m = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    row = tl.load(rows_ptr + m).to(tl.int64)  # all of these are older than the kernel ahead
    position = tl.load(positions_ptr + m)
    temperature, top_p, _, top_k, seed = draw_parameters(row, knobs_ptr, whole_ptr)
    temperature, top_k = _limits(temperature, top_k, V)
    number = uniform(seed, (position + 1).to(tl.int64))
    largest = tl.load(sorted_ptr + m * V)
    highest = largest.to(tl.float64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    blocks = tl.cdiv(V, BLOCK)
    sums = tl.load(sums_ptr + m * blocks + at, mask=at < blocks, other=0)
    passed = tl.load(passed_ptr + m * blocks + at, mask=at < blocks, other=0)
    before = tl.associative_scan(sums, 0, add) - sums
    inside = at < blocks
    line = sorted_ptr + m * V

    # Tokens before which less than top_p has been reached.
    most = top_p * tl.sum(sums, axis=0).to(tl.float64)
    block = tl.sum((inside & (before.to(tl.float64) < most)).to(tl.int32), axis=0) - 1
    block = tl.maximum(block, 0)
    start = tl.sum(tl.where(at == block, before, 0), axis=0)
    place, _, mass = _masses(line, block, highest, temperature, top_k)
    reached = start + tl.associative_scan(mass, 0, add)
    short = (place < top_k) & ((reached - mass).to(tl.float64) < most)
    by_top_p = block * BLOCK + tl.sum(short.to(tl.int32), axis=0)
    last = tl.maximum(tl.minimum(by_top_p, tl.sum(passed, axis=0)) - 1, 0)

    # The mass of all tokens that pass.
    block = last // BLOCK
    start = tl.sum(tl.where(at == block, before, 0), axis=0)
    place, _, mass = _masses(line, block, highest, temperature, top_k)
    limit = start + tl.sum(tl.where(place <= last, mass, 0), axis=0)
    target = tl.minimum((number * limit.to(tl.float64)).to(tl.int64), limit - 1)

    # The token in whose mass the random number lies.
    block = tl.sum((inside & (before <= target)).to(tl.int32), axis=0) - 1
    block = tl.maximum(block, 0)
    start = tl.sum(tl.where(at == block, before, 0), axis=0)
    place, _, mass = _masses(line, block, highest, temperature, top_k)
    reached = start + tl.associative_scan(mass, 0, add)
    ahead = block * BLOCK + tl.sum((reached <= target).to(tl.int32), axis=0)
    token = tl.load(ids_ptr + m * V + tl.minimum(ahead, last))
    settle(
        m, row, position, token, largest,
        positions_ptr, token_ptr, ring_ptr, counts_ptr, tokens_ptr, R, V, COUNTED,
    )  # fmt: skip


def draw_sorted(
    logits: Tensor,
    sampler: SamplerRows,
    rows: Tensor,
    positions: Tensor,
    token: Tensor,
    ring: Tensor,
    ids: Tensor | None = None,
) -> None:
    """Draw and settle the next token of every row, from any number; see `Ops.choose`."""
    M, V = logits.shape[0], sampler.vocabulary
    scores = logits[:, :V] + 0.0  # -0 becomes 0, which may order after it otherwise
    best = scores.sort(dim=1, descending=True, stable=True)
    blocks = triton.cdiv(V, BLOCK.value)
    sums = torch.empty((M, blocks), dtype=torch.int64, device=logits.device)
    passed = torch.empty((M, blocks), dtype=torch.int32, device=logits.device)
    parameters = rows, sampler.knobs, sampler.whole
    pdl = programmatic_launch(logits)
    options = {"PDL": pdl, "num_warps": 4, "launch_pdl": pdl, "enable_fp_fusion": False}
    run(_sum_masses_kernel, (blocks, M), best.values, sums, passed, *parameters, V, **options)
    run(
        _pick_kernel,
        (M,),
        *(best.values, best.indices, sums, passed, *parameters),
        *(positions, token, ring, sampler.counts, ids, V, sampler.rows),
        BLOCKS=max(2, power_of_two(blocks)),
        COUNTED=sampler.shape.adjusted,
        **options,
    )
