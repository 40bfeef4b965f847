"""experts_gemm: a prompt's tokens through their experts, those of one expert together.

    act[p] = silu(gate_e @ h[p // slots]) * (up_e @ h[p // slots])          (p in order of experts)
    out[p] = share[p] * down_e @ act[p]                                     (FP32, p by token)
    y[b]   = x[b] + sum_s out[b * slots + s]

Layout  h [M, K] bf16 normed, weights in tiles of all experts (`tiled_experts`); act [P, I] bf16
        and out [P, N] fp32 of P = M * slots pairs, for at most MOST_TOKENS tokens at a time
Plan    a program takes up to ROWS pairs of one expert and some tiles. Codes become BF16 weights in
        registers, rounded once as those of `widen` are: they are the A operand of tensor cores as
        they lie, and tokens are columns. Blocks of few pairs take a shorter loop. Blocks are found
        from where the experts end, as many as there could be. A token's slots are summed in order,
        with the residual in FP32
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.kernels.device import run
from lowbit.runtime.kernels.experts_blocks import down_blocks, gate_up_blocks
from lowbit.runtime.kernels.experts_launch import EXPERTS_GEMM
from lowbit.runtime.kernels.experts_route import by_expert, experts_route, place_of
from lowbit.runtime.kernels.tiled_experts import TiledExperts

MOST_TOKENS = 1024
BLOCK = 1024  # columns of a sum


@triton.jit
def _experts_blocks_kernel(
    ends_ptr, blocks_ptr, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Expert, first place and end of a block's places, which are equal past the last block."""
    block = tl.program_id(0)
    expert, first, end = place_of(block, ends_ptr, EXPERTS, EXPERTS_BLOCK, ROWS)
    tl.store(blocks_ptr + block * 4, expert)
    tl.store(blocks_ptr + block * 4 + 1, first)
    tl.store(blocks_ptr + block * 4 + 2, tl.minimum(end, first + ROWS))


@triton.jit
def _experts_sum_kernel(x_ptr, out_ptr, y_ptr, N, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for slot in range(SLOTS):
        y += tl.load(out_ptr + (token * SLOTS + slot) * N + n, mask=n < N, other=0.0)
    y += tl.load(x_ptr + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


def experts_gemm(
    h: Tensor,
    scores: Tensor,
    gate_up: TiledExperts,
    down: TiledExperts,
    chosen: int,
    shared: bool,
    x: Tensor,
) -> Tensor:
    """Add to every token what its experts make of it, for many tokens.

    Args:
        h: [M, K] bfloat16, the normed tokens.
        scores: [M, experts] float32, of the router.
        gate_up: [2 * I, K] of every expert, paired.
        down: [K, I] of every expert.
        chosen: experts of a token, beside the shared one.
        shared: the last expert is every token's.
        x: [M, K], the residual.

    Returns:
        [M, K] in x's dtype.
    """
    y = torch.empty_like(x)
    for first in range(0, x.shape[0], MOST_TOKENS):
        part = slice(first, first + MOST_TOKENS)
        routes = experts_route(scores[part], chosen, shared)
        order, ends = by_expert(routes.numbers, len(gate_up))
        blocks = _blocks(order, ends, EXPERTS_GEMM.rows)
        act = gate_up_blocks(h[part], order, blocks, gate_up, chosen + shared, EXPERTS_GEMM)
        out = down_blocks(act, order, blocks, routes.shares, down, EXPERTS_GEMM)
        _sum(x[part], out, y[part])
    return y


def _blocks(order: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Expert, first place and end of every block: [blocks, 4] int32; the fourth number is unused.

    At least as many as any choice of experts fills, each with pairs of one expert.
    """
    pairs, experts = len(order), len(ends)
    count = min(pairs, pairs // rows + experts)
    blocks = torch.empty((count, 4), dtype=torch.int32, device=order.device)
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


def _sum(x: Tensor, out: Tensor, y: Tensor) -> None:
    """Fill y with the residual and what a token's slots add, in order."""
    M, N = x.shape
    run(
        _experts_sum_kernel,
        (M, triton.cdiv(N, BLOCK)),
        x,
        out,
        y,
        N,
        SLOTS=len(out) // M,
        BLOCK=BLOCK,
        enable_fp_fusion=True,
    )
