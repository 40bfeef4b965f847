"""A mixture of experts on a CPU: experts that were chosen take turns, each with its tokens."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.runtime.backends.cpu_linear import CpuLinear, linear, rms_norm, swiglu_of
from lowbit.runtime.weights.linear import DenseLinear, ExpertWeights

VECTORS = 64  # elements that make whole vectors on every CPU


def mixture(
    x: Tensor,
    norm: Tensor,
    eps: float,
    experts: ExpertWeights[CpuLinear],
    last: Callable[[Tensor, CpuLinear], Tensor] = linear,
) -> Tensor:
    """Weighted sum of the experts' outputs for the normed x, [M, h] to [M, h] float32.

    A token's sum runs over its experts by number, then the shared one, whatever the other tokens'.

    last: product of an expert's last linear.
    """
    E = len(experts.gate_up) - experts.shared
    h = rms_norm(x, norm, eps)

    def outputs(tokens: Tensor | slice, expert: int) -> Tensor:
        """Output of an expert for some tokens: [m, h] float32."""
        gate_up = experts.gate_up[expert]
        act = swiglu_of(linear(x[tokens], gate_up, norm, eps, h[tokens]), gate_up)
        return last(act.to(x.dtype), experts.down[expert]).float()

    scores = linear(h.float(), DenseLinear(experts.router.float()))  # [M, E], or one more
    shares, numbers = routes(scores[:, :E], experts.chosen, experts.normed)
    places = numbers.flatten().argsort(stable=True)  # by expert, then by token
    counts: list[int] = numbers.flatten().bincount(minlength=E).tolist()
    parts = torch.split(places, [count for count in counts if count])
    hit = [expert for expert, count in enumerate(counts) if count]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, part in zip(hit, parts, strict=True):
        tokens = part // experts.chosen
        out[tokens] += shares.flatten()[part, None] * outputs(tokens, expert)
    if experts.shared:
        out += _shared_gates(scores[:, E:]) * outputs(slice(None), E)
    return out


def routes(scores: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    """The experts of every token: the likeliest, of equal ones those of lower number.

    Args:
        scores: [M, E] float32, of the router.
        chosen: k, experts of a token.
        normed: shares sum to one; else they are those of a softmax over all experts.

    Returns:
        [M, k] float32, shares, and [M, k] int64, the experts' numbers.
    """
    likely, numbers = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
    likely = likely[:, :chosen].contiguous()
    shares = likely / likely.sum(-1, keepdim=True) if normed else likely
    return shares, numbers[:, :chosen].contiguous()


def _shared_gates(scores: Tensor) -> Tensor:
    """Sigmoid of [M, 1], padded to whole vectors: PyTorch rounds what is left over otherwise."""
    M = len(scores)
    return torch.sigmoid(functional.pad(scores, (0, 0, 0, -M % VECTORS)))[:M]
