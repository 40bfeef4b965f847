"""The ops of `backends.ops` on a CPU; linear layers are in `backends.cpu_linear`."""

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.runtime.backends import delta_rule
from lowbit.runtime.backends.cpu_linear import CpuLinear, linear
from lowbit.runtime.state import sampling
from lowbit.runtime.state.cache import KVCache
from lowbit.runtime.state.delta import DeltaState, DeltaWeights
from lowbit.runtime.state.rope import Rope


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of table [V, h] for ids [M]: [M, h]."""
    return table[ids]


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, w: CpuLinear, bias: Tensor | None = None
) -> Tensor:
    """`rms_norm(x) * norm @ w.T + bias`: [M, K] to [M, N]."""
    y = linear(rms_norm(x, norm, eps), w)
    return y if bias is None else y + bias


def norm_linears(
    x: Tensor, norm: Tensor, eps: float, w: CpuLinear, small: CpuLinear
) -> tuple[Tensor, Tensor]:
    """`norm_linear` of two weights; see `Ops.norm_linears`."""
    return norm_linear(x, norm, eps, w), norm_linear(x, norm, eps, small)


def norm_logits(x: Tensor, norm: Tensor, eps: float, w: CpuLinear) -> Tensor:
    """`rms_norm(x) * norm @ w.T` of a head: [M, K] to [M, V] float32."""
    return norm_linear(x, norm, eps, w).float()


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, gate_up: CpuLinear) -> Tensor:
    """`silu(gate) * up` of the normed x: [M, K] to [M, N / 2]; gate is the first N / 2 rows."""
    gate, up = linear(rms_norm(x, norm, eps), gate_up).chunk(2, dim=-1)
    return functional.silu(gate) * up


def linear_add(x: Tensor, w: CpuLinear, residual: Tensor) -> Tensor:
    """`residual + x @ w.T`: [M, N]."""
    return residual + linear(x, w)


def attention(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Rope,
    cache: KVCache,
    layer: int,
    gated: bool = False,
) -> Tensor:
    """Norm and rotate q and k, append k and v to the cache, attend causally: [M, Hq * D]."""
    keys, values = cache.k[layer], cache.v[layer]
    if cache.sequences == 1:
        return _attended(qkv, q_norm, k_norm, eps, rope, keys, values, cache.length, gated)
    parts = zip(
        qkv[:, None],
        keys.chunk(cache.sequences),
        values.chunk(cache.sequences),
        cache.position.tolist(),
        strict=True,
    )
    return torch.cat(
        [
            _attended(token, q_norm, k_norm, eps, rope, own_keys, own_values, position, gated)
            for token, own_keys, own_values, position in parts
        ]
    )


def _attended(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Rope,
    keys: Tensor,
    values: Tensor,
    start: int,
    gated: bool,
) -> Tensor:
    """The M tokens from `start` on of one sequence, its keys and values [Hkv, T, D]."""
    M = qkv.shape[0]
    Hkv, _, D = keys.shape
    stop = start + M
    heads = qkv.view(M, -1, D).transpose(0, 1)  # [Hq + 2 * Hkv, M, D], a gate beside each q
    q, k, v = heads[: -2 * Hkv], heads[-2 * Hkv : -Hkv], heads[-Hkv:]
    if gated:
        q, gate = q[0::2], q[1::2]
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    q = _rotate(q, rope, start, stop)
    keys[:, start:stop] = _rotate(k, rope, start, stop)
    values[:, start:stop] = v
    k, v = keys[:, :stop], values[:, :stop]  # [Hkv, stop, D]
    mask = None
    if M > 1:
        mask = torch.ones(M, stop, dtype=torch.bool, device=qkv.device).tril(start)
    out = functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, enable_gqa=True
    )
    mixed = out[0] * torch.sigmoid(gate) if gated else out[0]
    return mixed.transpose(0, 1).reshape(M, -1)


def delta_linear(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    eps: float,
    state: DeltaState,
    layer: int,
    w: CpuLinear,
    residual: Tensor,
) -> Tensor:
    """Gated DeltaNet and its output linear; see `Ops.delta_linear`."""
    return linear_add(delta_net(qkvz, ba, weights, eps, state, layer), w, residual)


def delta_net(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, eps: float, state: DeltaState, layer: int
) -> Tensor:
    """What `delta_linear` multiplies: [M, Hv * Dv]."""
    if state.sequences == 1:
        return delta_rule.delta_net(qkvz, ba, weights, eps, state, layer)
    each = [
        delta_rule.delta_net(qkvz[b : b + 1], ba[b : b + 1], weights, eps, state.of(b), layer)
        for b in range(state.sequences)
    ]
    return torch.cat(each)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` in FP32, rounded to weight's dtype, times weight: [..., D] in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def _rotate(x: Tensor, rope: Rope, start: int, stop: int) -> Tensor:
    """Rotate the first r dimensions of [H, M, D] by positions start to stop, in FP32."""
    cos, sin = rope.cos[start:stop], rope.sin[start:stop]  # [M, r / 2]
    half = cos.shape[-1]
    wide = x.float()
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


def advance(
    logits: Tensor, sampler: sampling.Sampler, token: Tensor, position: Tensor, slots: Tensor
) -> None:
    """Choose the next token and move on; see `Ops.advance`."""
    sampling.advance(logits, sampler, token, position)
    post(token, sampler.nonfinite, position, slots)


def post(token: Tensor, nonfinite: Tensor, position: Tensor, slots: Tensor) -> None:
    """Leave a token, or -1, where the host reads it; see `Ops.post`."""
    slots[int(position[0]) % 2] = token[0] | nonfinite[0]
