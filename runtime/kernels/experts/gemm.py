"""experts_gemm: a prompt's tokens through their experts, those of one expert together.

    act = silu(gate_e @ h) * (up_e @ h), out = share * down_e @ act     for each pair of token and e
    y[b] = x[b] + sum_s out[b * slots + s]

Plan    pairs are put in the order of their experts (`experts_order`) and multiplied in blocks
        (`experts_products`), EXPERTS_CHUNK tokens at a time. A token's slots are then summed in
        order, with the residual in FP32
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.kernels.experts.order import blocks_of, by_expert
from lowbit.runtime.kernels.experts.products import down_blocks, gate_up_blocks
from lowbit.runtime.kernels.experts.route import experts_route
from lowbit.runtime.kernels.experts.tiled import stacked
from lowbit.runtime.kernels.launch.device import run
from lowbit.runtime.kernels.launch.experts import EXPERTS_GEMM
from lowbit.runtime.kernels.linear.tiles import GpuLinear
from lowbit.runtime.thresholds import EXPERTS_CHUNK
from lowbit.runtime.weights.linear import ExpertWeights

BLOCK = 1024  # columns of a sum


@triton.jit
def _experts_sum_kernel(x_ptr, out_ptr, y_ptr, N, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for slot in range(SLOTS):
        y += tl.load(out_ptr + (token * SLOTS + slot) * N + n, mask=n < N, other=0.0)
    y += tl.load(x_ptr + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


def experts_gemm(h: Tensor, scores: Tensor, experts: ExpertWeights[GpuLinear], x: Tensor) -> Tensor:
    """Add the output of its experts to every token, for many tokens: [M, K] in x's dtype.

    Args:
        h: [M, K] bfloat16, the normed tokens.
        scores: [M, experts] float32, of the router.
        experts: of `gathered`.
        x: [M, K], the residual.
    """
    gate_up, down = stacked(experts.gate_up), stacked(experts.down)
    slots = experts.chosen + experts.shared
    y = torch.empty_like(x)
    for first in range(0, x.shape[0], EXPERTS_CHUNK):
        part = slice(first, first + EXPERTS_CHUNK)
        routes = experts_route(scores[part], experts)
        order, ends = by_expert(routes.numbers, len(gate_up))
        blocks = blocks_of(order, ends, EXPERTS_GEMM.rows)
        act = gate_up_blocks(h[part], order, blocks, gate_up, slots, EXPERTS_GEMM)
        out = down_blocks(act, order, blocks, routes.shares, down, EXPERTS_GEMM)
        _sum(x[part], out, y[part])
    return y


def _sum(x: Tensor, out: Tensor, y: Tensor) -> None:
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
