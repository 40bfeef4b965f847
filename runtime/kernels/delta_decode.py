"""delta_decode: one token of a gated DeltaNet layer.

    q, k, v = silu(conv(window, token))                      (depthwise, over the last W inputs)
    q, k    = q * rsqrt(sum(q^2) + 1e-6) / sqrt(Dk), k * rsqrt(sum(k^2) + 1e-6)
    S       = exp(g) * S + k u^T,   u = beta * (v - exp(g) * S^T k)       (per value head, FP32)
    out     = gated_norm(S^T q)

Layout  qkvz [1, C + Hv * Dv] bf16, ba [1, 2 * Hv], memory [Hv, Dk, Dv] fp32, window [W - 1, C] bf16
Bytes   8 * Hv * Dk * Dv; 32 heads of 128 x 128: 4.2 MB = 1 us at 4.3 TB/s
Plan    two kernels. The recurrence: a program per value head and some columns of its S, which need
        nothing of the other columns, since S^T q of the new S is exp(g) * S^T q + (k . q) * u: S is
        read once and written once. Every program convolves the q and k it needs itself, a few KB
        from L2: cheaper than a kernel more in the chain. Then `gated_norm`, which needs whole heads
        and moves the window that the programs here read. No atomics, so bit-reproducible
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.delta import DeltaState, DeltaWeights
from lowbit.runtime.kernels.delta_gates import gates, gates_ref
from lowbit.runtime.kernels.delta_out import gated_norm, gated_norm_ref, window_ref
from lowbit.runtime.kernels.device import programmatic_launch
from lowbit.runtime.kernels.launch import delta_launch

L2_EPS = 1e-6  # on the sum of squares, whatever the model's eps


def delta_decode_ref(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, eps: float, state: DeltaState, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The values `delta_decode` approximates; the state is not written.

    Returns:
        out [1, Hv * Dv] and the new memory [Hv, Dk, Dv] in float64, and the new window [W - 1, C].
    """
    C, _ = weights.conv.shape
    Hk, Dk = weights.key_heads, weights.key_dim
    Hv, Dv = weights.value_heads, weights.value_dim
    window, S = state.conv[layer], state.memory[layer].double()
    inputs = torch.cat((window.double(), qkvz[:, :C].double()))  # [W, C]
    mixed = torch.nn.functional.silu((inputs * weights.conv.double().T).sum(0))
    q, k, v = mixed.split((Hk * Dk, Hk * Dk, Hv * Dv))
    q, k = q.view(Hk, Dk), k.view(Hk, Dk)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * Dk**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    q, k = q.repeat_interleave(Hv // Hk, 0), k.repeat_interleave(Hv // Hk, 0)
    beta, g = gates_ref(ba, weights)
    S = S * g[0].exp()[:, None, None]
    u = beta[0][:, None] * (v.view(Hv, Dv) - torch.einsum("hkv,hk->hv", S, k))
    S = S + k[:, :, None] * u[:, None, :]
    o = torch.einsum("hkv,hk->hv", S, q).view(1, -1)
    return gated_norm_ref(o, qkvz, weights, eps), S, window_ref(qkvz, window)


@triton.jit
def _taps(taps_ptr, channels, W: tl.constexpr):
    """The W taps of some channels, oldest first."""
    taps = ()
    for tap in tl.static_range(W):
        one = tl.load(taps_ptr + channels * W + tap).to(tl.float32)
        taps = taps + (one,)
    return taps


@triton.jit
def _convolved(token_ptr, window_ptr, taps, channels, C: tl.constexpr, W: tl.constexpr):
    """Convolution and SiLU of some channels of the one token, in FP32."""
    y = tl.load(token_ptr + channels).to(tl.float32) * taps[W - 1]
    for row in tl.static_range(W - 1):
        y += tl.load(window_ptr + row * C + channels).to(tl.float32) * taps[row]
    return y * tl.sigmoid(y)


@triton.jit
def _recurrence_kernel(
    qkvz_ptr,
    ba_ptr,
    window_ptr,
    memory_ptr,
    taps_ptr,
    decay_ptr,
    dt_bias_ptr,
    o_ptr,
    l2_eps,
    Hk: tl.constexpr,
    Hv: tl.constexpr,
    Dk: tl.constexpr,
    Dv: tl.constexpr,
    W: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    C: tl.constexpr = 2 * Hk * Dk + Hv * Dv
    head, split = tl.program_id(0), tl.program_id(1)
    offs_k = tl.arange(0, Dk)
    offs_v = split * BLOCK_V + tl.arange(0, BLOCK_V)
    of_q = head // (Hv // Hk) * Dk + offs_k
    of_k = Hk * Dk + of_q
    of_v = 2 * Hk * Dk + head * Dv + offs_v
    q_taps = _taps(taps_ptr, of_q, W)
    k_taps = _taps(taps_ptr, of_k, W)
    v_taps = _taps(taps_ptr, of_v, W)
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile = memory_ptr + head * (Dk * Dv) + offs_k[:, None] * Dv + offs_v[None, :]
    S = tl.load(tile)  # [Dk, BLOCK_V]
    beta, g = gates(tl.load(ba_ptr + head), tl.load(ba_ptr + Hv + head), decay, dt_bias)
    q = _convolved(qkvz_ptr, window_ptr, q_taps, of_q, C, W)
    k = _convolved(qkvz_ptr, window_ptr, k_taps, of_k, C, W)
    v = _convolved(qkvz_ptr, window_ptr, v_taps, of_v, C, W)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + l2_eps) * Dk**-0.5
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + l2_eps)
    S *= tl.exp(g)
    u = beta * (v - tl.sum(S * k[:, None], axis=0))
    o = tl.sum(S * q[:, None], axis=0) + tl.sum(q * k, axis=0) * u
    tl.store(tile, S + k[:, None] * u[None, :])
    tl.store(o_ptr + head * Dv + offs_v, o)


def delta_decode(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, eps: float, state: DeltaState, layer: int
) -> Tensor:
    """One token of a gated DeltaNet layer, without its linears; see `Ops.delta_net`.

    Returns:
        [1, Hv * Dv] in the dtype of qkvz; the state's layer has moved on by the token.
    """
    Hv, Dk, Dv = state.memory.shape[1:]
    o = torch.empty((1, Hv * Dv), dtype=torch.float32, device=qkvz.device)
    launch = delta_launch(Hv, Dv)
    pdl = programmatic_launch(qkvz)
    _recurrence_kernel[(Hv, Dv // launch.block_v)](
        qkvz,
        ba,
        state.conv[layer],
        state.memory[layer],
        weights.conv,
        weights.decay,
        weights.dt_bias,
        o,
        L2_EPS,
        Hk=weights.key_heads,
        Hv=Hv,
        Dk=Dk,
        Dv=Dv,
        W=weights.conv.shape[1],
        BLOCK_V=launch.block_v,
        PDL=pdl,
        num_warps=launch.num_warps,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return gated_norm(o, qkvz, weights, eps, state.conv[layer])
