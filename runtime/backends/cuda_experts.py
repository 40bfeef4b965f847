"""A mixture of experts on a GPU: three kernels for few tokens, experts in turn for many."""

import torch
from torch import Tensor

from lowbit.runtime.kernels.dense_gemv import dense_gemv
from lowbit.runtime.kernels.experts_down import experts_down
from lowbit.runtime.kernels.experts_gate_up import experts_gate_up
from lowbit.runtime.kernels.experts_gemm import experts_gemm
from lowbit.runtime.kernels.rows import rms_norm
from lowbit.runtime.kernels.tiled_experts import stacked
from lowbit.runtime.kernels.tiles import GpuLinear
from lowbit.runtime.weights.experts import ExpertWeights

FEW_TOKENS = 64  # each computed as if it were alone; more are taken expert by expert


def mixture(x: Tensor, norm: Tensor, eps: float, experts: ExpertWeights[GpuLinear]) -> Tensor:
    """`x` plus what the experts make of the normed x; see `Ops.moe`."""
    gate_up, down = stacked(experts.gate_up), stacked(experts.down)
    chosen, shared = experts.chosen, experts.shared
    if x.shape[0] <= FEW_TOKENS:
        scores = dense_gemv(x, experts.router, norm=norm, eps=eps, dtype=torch.float32)
        act = experts_gate_up(x, norm, eps, scores, gate_up, chosen, shared)
        return experts_down(act, scores, down, chosen, shared, x)
    h = rms_norm(x, norm, eps)
    scores = torch.mm(h, experts.router.T, out_dtype=torch.float32)
    return experts_gemm(h, scores, gate_up, down, chosen, shared, x)
