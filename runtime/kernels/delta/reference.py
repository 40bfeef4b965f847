"""Gated DeltaNet in float64, token by token: the values that the kernels here approximate."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from lowbit.runtime.state.delta import L2_EPS, LayerStates
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import DeltaLayer


def delta_ref(
    qkvz: Tensor, ba: Tensor, layer: DeltaLayer, states: LayerStates, step: Step
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Results of `delta_decode` and `delta_prefill`, a token at a time; no slot is written.

    Yields:
        out [Hv * Dv], and the state after the token: memory [Hv, Dk, Dv], and window [W - 1, C] in
        the slots' dtype.
    """
    starts = step.starts.tolist()
    for slot, first, end in zip(step.read.tolist(), starts, starts[1:], strict=False):
        window, memory = states.window[slot], states.memory[slot].double()
        for x, gate in zip(qkvz[first:end], ba[first:end], strict=True):
            out, memory, window = _token(x, gate, layer, window, memory)
            yield out, memory, window


def _token(
    qkvz: Tensor, ba: Tensor, layer: DeltaLayer, window: Tensor, S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    C, _ = layer.conv.shape
    Hk, Dk = layer.key_heads, layer.key_dim
    Hv, Dv = layer.value_heads, layer.value_dim
    inputs = torch.cat((window, qkvz[None, :C].to(window.dtype)))  # [W, C]
    mixed = silu((inputs.double() * layer.conv.double().T).sum(0))
    q, k, v = mixed.split((Hk * Dk, Hk * Dk, Hv * Dv))
    q, k = q.view(Hk, Dk), k.view(Hk, Dk)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * Dk**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    q, k = q.repeat_interleave(Hv // Hk, 0), k.repeat_interleave(Hv // Hk, 0)
    beta, g = gates_ref(ba, layer)
    S = S * g.exp()[:, None, None]
    u = beta[:, None] * (v.view(Hv, Dv) - torch.einsum("hkv,hk->hv", S, k))
    S = S + k[:, :, None] * u[:, None, :]
    o = torch.einsum("hkv,hk->hv", S, q)
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.eps)
    z = qkvz[C:].double().view(Hv, Dv)
    return (normed * layer.norm.double() * silu(z)).flatten(), S, inputs[1:]


def gates_ref(ba: Tensor, layer: DeltaLayer) -> tuple[Tensor, Tensor]:
    """Beta and g, each [..., Hv], of ba [..., 2 * Hv]; see `gates`."""
    b, a = ba.double().chunk(2, dim=-1)
    step = softplus(a + layer.dt_bias.double(), threshold=1e9)
    return b.sigmoid(), layer.decay.double() * step


def norm_heads_ref(parts: Tensor, squares: Tensor, eps: float) -> Tensor:
    """Result of `norm_heads`: [M, Hv * Dv]."""
    heads = parts.double().view(*squares.shape[:2], -1)
    mean = squares.double().sum(-1, keepdim=True) / heads.shape[-1]
    return (heads * torch.rsqrt(mean + eps)).view(parts.shape)
