"""choose: the next token of several rows, as `cpu_sampling` chooses it.

Layout  logits [M, V or more] fp32 -> token [M] int64, ring [RING, R] int64 on the host; the
        position of every row but the scratch row moves on by one, and the output's counts grow
        where they are kept. The slot gets -1 where the row's largest logit is not finite
Bytes   4 * V a row; V = 151936: 0.6 MB, from L2
Plan    A program per block of a row's logits stores the best key of each group. For the likeliest
        token a block is one group, and one program a row takes the best of all; drawing goes on in
        `draw_rows`. Where a row draws from more than 64 tokens, `draw_sorted` does it all. The last
        kernel also leaves the token where the host reads it, which saves one. No atomics
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import power_of_two, programmatic_launch, run
from lowbit.runtime.kernels.sampling.adjust import adjust
from lowbit.runtime.kernels.sampling.draw import draw_rows
from lowbit.runtime.kernels.sampling.draw_sorted import draw_sorted
from lowbit.runtime.kernels.sampling.keys import BLOCK, GROUP, LOWEST, id_of, key_of, value_of
from lowbit.runtime.kernels.sampling.row import settle
from lowbit.runtime.state.sampler import ALL, SamplerRows


@triton.jit
def _best_rows_kernel(
    logits_ptr, keys_ptr, blocks_ptr, stride, V, GROUP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The best key of each group of a block of a row, and of the block where it has several."""
    m = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits_ptr + m * stride + ids, mask=ids < V, other=float("-inf"))
    keys = key_of(x, ids)
    groups: tl.constexpr = BLOCK // GROUP
    best = tl.max(tl.reshape(keys, (groups, GROUP)), axis=1)
    count = tl.num_programs(0) * groups
    tl.store(keys_ptr + m * count + tl.program_id(0) * groups + tl.arange(0, groups), best)
    if groups > 1:
        tl.store(blocks_ptr + m * tl.num_programs(0) + tl.program_id(0), tl.max(best, axis=0))


@triton.jit
def _likeliest_rows_kernel(
    keys_ptr, rows_ptr, positions_ptr, token_ptr, ring_ptr, counts_ptr, ids_ptr, count, V, R,
    KEYS: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Settle the token of the best of a row's `count` keys; KEYS: a power of two."""
    m = tl.program_id(0)
    at = tl.arange(0, KEYS)
    row = tl.load(rows_ptr + m)  # older than the kernel ahead, which has waited
    position = tl.load(positions_ptr + m)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    keys = tl.load(keys_ptr + m.to(tl.int64) * count + at, mask=at < count, other=LOWEST)
    best = tl.max(keys, axis=0)
    token = tl.minimum(id_of(best), V - 1).to(tl.int64)  # whatever the logits are
    settle(
        m, row, position, token, value_of(best),
        positions_ptr, token_ptr, ring_ptr, counts_ptr, ids_ptr, R, V, COUNTED,
    )  # fmt: skip


def choose(
    logits: Tensor,
    sampler: SamplerRows,
    rows: Tensor,
    positions: Tensor,
    token: Tensor,
    ring: Tensor,
    masks: Tensor | None = None,
    ids: Tensor | None = None,
) -> None:
    """Choose the next token of every row and leave it where the host reads it; see `Ops.choose`."""
    shape = sampler.shape
    scores = adjust(logits, sampler, rows, masks) if shape.adjusted else logits
    if shape.candidates == ALL:
        draw_sorted(scores, sampler, rows, positions, token, ring, ids)
        return
    group = BLOCK.value if shape.candidates == 1 else GROUP.value
    keys, blocks = best_rows(scores, sampler.vocabulary, group)
    if shape.candidates > 1:
        draw_rows(scores, keys, blocks, sampler, rows, positions, token, ring, ids)
        return
    M, count = keys.shape
    pdl = programmatic_launch(keys)
    run(
        _likeliest_rows_kernel,
        (M,),
        *(keys, rows, positions, token, ring, sampler.counts, ids),
        *(count, sampler.vocabulary, sampler.rows),
        KEYS=max(2, power_of_two(count)),
        COUNTED=shape.adjusted,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )


def best_rows(logits: Tensor, V: int, group: int) -> tuple[Tensor, Tensor]:
    """The best key of each group of logits, and of each block.

    Args:
        logits: [M, V or more] float32.
        V: real tokens.
        group: logits of a group, a divisor of BLOCK.

    Returns:
        [M, groups] int64, the groups of V rounded up to whole blocks, and [M, blocks] int64, which
        is not written where a block is one group.
    """
    M, programs = logits.shape[0], triton.cdiv(V, BLOCK.value)
    keys, blocks = (
        torch.empty((M, programs * each), dtype=torch.int64, device=logits.device)
        for each in (BLOCK.value // group, 1)
    )
    pdl = programmatic_launch(logits)
    run(
        _best_rows_kernel,
        (programs, M),
        *(logits, keys, blocks, logits.stride(0), V),
        GROUP=group,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return keys, blocks
