"""A mixture of experts on a GPU: few tokens one by one, more grouped by expert."""

import torch
from torch import Tensor

from lowbit.formats.architectures.config import Experts
from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.kernels.codec import CODECS
from lowbit.runtime.kernels.experts.down import experts_down, experts_down_bytes
from lowbit.runtime.kernels.experts.gate_up import experts_gate_up, experts_gate_up_bytes
from lowbit.runtime.kernels.experts.gemm import experts_gemm
from lowbit.runtime.kernels.experts.int8.grouped import block_rows, experts_grouped_int8
from lowbit.runtime.kernels.experts.int8.lone import down_int8, gate_up_int8
from lowbit.runtime.kernels.experts.route import experts_route
from lowbit.runtime.kernels.experts.tiled import stacked
from lowbit.runtime.kernels.experts.together import experts_together, together_bytes
from lowbit.runtime.kernels.launch.device import STATIC_SHARED, card_of
from lowbit.runtime.kernels.launch.experts import experts_way
from lowbit.runtime.kernels.linear.dense import dense_gemv
from lowbit.runtime.kernels.linear.tiles import GpuLinear
from lowbit.runtime.kernels.rows import rms_norm
from lowbit.runtime.thresholds import EXPERTS_APART, EXPERTS_CHUNK
from lowbit.runtime.weights.linear import ExpertWeights

MOST_SLOTS = 32  # of a warp's lanes
MOST_SHARED = 96 << 10  # bytes of a program that every card has


def check_experts(experts: Experts, hidden: int) -> None:
    """Refuse experts that the kernels cannot compute.

    Args:
        hidden: size of a token.

    Raises:
        UnsupportedModelError: naming the size.
    """
    slots = experts.chosen + (experts.shared_inner is not None)
    down = max(experts_down_bytes(bits, experts.inner, hidden, slots) for bits in CODECS)
    gate_up = max(experts_gate_up_bytes(bits, experts.inner, hidden) for bits in CODECS)
    for wrong, what in (
        (slots > MOST_SLOTS, f"{slots} experts of a token, at most {MOST_SLOTS}"),
        (down > MOST_SHARED, f"{slots} experts of a token as wide as {experts.inner}"),
        (gate_up > STATIC_SHARED, f"tokens of {hidden}"),
    ):
        if wrong:
            raise UnsupportedModelError(
                f"experts have no GPU kernel: {what}", hint="run on the CPU with --device cpu"
            )


def mixture(
    x: Tensor,
    norm: Tensor,
    eps: float,
    experts: ExpertWeights[GpuLinear],
    residual: Tensor | None = None,
) -> Tensor:
    """Add the output of the experts for the normed x to x; see `Ops.moe`.

    residual: [M, h], added in place of x, whose dtype the result has.
    """
    onto, way = x if residual is None else residual, experts_way(len(x))
    if stacked(experts.gate_up).activations == "int8":
        return _mixture_int8(x, norm, eps, experts, onto)
    scores = dense_gemv(x, experts.router, norm=norm, eps=eps, dtype=torch.float32)
    if way == "grouped":
        return experts_gemm(rms_norm(x, norm, eps), scores, experts, onto)
    routes = None if way == "lone" else experts_route(scores, experts)
    if routes and way == "together" and together_bytes(experts) <= MOST_SHARED:
        return experts_together(x, norm, eps, routes, experts, onto)
    act = experts_gate_up(x, norm, eps, scores, routes, experts)
    return experts_down(act, scores, routes, experts, onto)


def _mixture_int8(
    x: Tensor, norm: Tensor, eps: float, experts: ExpertWeights[GpuLinear], residual: Tensor
) -> Tensor:
    """`mixture` with x in eight bits: a token has the same bits in any company, and in a prompt."""
    if len(x) > EXPERTS_CHUNK:
        parts = zip(*(torch.split(each, EXPERTS_CHUNK) for each in (x, residual)), strict=True)
        return torch.cat([_mixture_int8(part, norm, eps, experts, own) for part, own in parts])
    scores = dense_gemv(x, experts.router, norm=norm, eps=eps, dtype=torch.float32)
    routes = None if len(x) == 1 else experts_route(scores, experts)
    rows = 0
    if routes and len(x) > EXPERTS_APART:
        rows = block_rows(routes.numbers.numel(), experts, card_of(x).shared_bytes)
    if routes and rows:
        return experts_grouped_int8(x, norm, eps, routes, experts, rows, residual)
    act = gate_up_int8(x, norm, eps, scores, routes, experts)
    return down_int8(act, scores, routes, experts, residual)
