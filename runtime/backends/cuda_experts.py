"""A mixture of experts on a GPU: few tokens each as if alone, many expert by expert."""

import torch
from torch import Tensor

from lowbit.formats.architectures.config import Experts
from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.kernels.dense_gemv import dense_gemv
from lowbit.runtime.kernels.experts_down import experts_down, experts_down_bytes
from lowbit.runtime.kernels.experts_gate_up import experts_gate_up
from lowbit.runtime.kernels.experts_gemm import experts_gemm
from lowbit.runtime.kernels.experts_route import experts_route
from lowbit.runtime.kernels.rows import rms_norm
from lowbit.runtime.kernels.tiled_experts import stacked
from lowbit.runtime.kernels.tiles import GpuLinear
from lowbit.runtime.weights.experts import ExpertWeights

MOST_SLOTS = 32  # of a warp's lanes
MOST_SHARED = 96 << 10  # bytes of a program that every card has
WIDE_BITS = 8
FEW_TOKENS = 64  # each computed as if it were alone; more are taken expert by expert


def check_experts(experts: Experts) -> None:
    """Refuse experts that the kernels have no place for.

    Raises:
        UnsupportedModelError: naming the size.
    """
    slots = experts.chosen + (experts.shared_inner is not None)
    size = experts_down_bytes(WIDE_BITS, experts.inner, slots)
    for wrong, what in (
        (slots > MOST_SLOTS, f"{slots} experts of a token, at most {MOST_SLOTS}"),
        (size > MOST_SHARED, f"{slots} experts of a token as wide as {experts.inner}"),
    ):
        if wrong:
            raise UnsupportedModelError(
                f"experts have no GPU kernel: {what}", hint="run on the CPU with --device cpu"
            )


def mixture(x: Tensor, norm: Tensor, eps: float, experts: ExpertWeights[GpuLinear]) -> Tensor:
    """`x` plus what the experts make of the normed x; see `Ops.moe`."""
    gate_up, down = stacked(experts.gate_up), stacked(experts.down)
    chosen, shared = experts.chosen, experts.shared
    if x.shape[0] <= FEW_TOKENS:
        scores = dense_gemv(x, experts.router, norm=norm, eps=eps, dtype=torch.float32)
        routes = None if x.shape[0] == 1 else experts_route(scores, chosen, shared)
        act = experts_gate_up(x, norm, eps, scores, routes, gate_up, chosen, shared)
        return experts_down(act, scores, routes, down, chosen, shared, x)
    h = rms_norm(x, norm, eps)
    scores = torch.mm(h, experts.router.T, out_dtype=torch.float32)
    return experts_gemm(h, scores, gate_up, down, chosen, shared, x)
