"""delta_decode: one token of a gated DeltaNet layer.

    q, k, v = silu(conv(window, token))                      (depthwise, over the last W inputs)
    q, k    = q * rsqrt(sum(q^2) + 1e-6) / sqrt(Dk), k * rsqrt(sum(k^2) + 1e-6)
    S       = exp(g) * S + k u^T,   u = beta * (v - exp(g) * S^T k)       (per value head, FP32)
    out     = gated_norm(S^T q)

Layout  qkvz [B, C + Hv * Dv] bf16, ba [B, 2 * Hv], memory [B * Hv, Dk, Dv] fp32, window
        [B * (W - 1), C] bf16; out [B, Hv * Dv] bf16
Bytes   8 * Hv * Dk * Dv; 32 heads of 128 x 128: 4.2 MB = 1 us at 4.3 TB/s
Plan    a program per value head and sequence holds the whole S in registers, read before the kernel
        waits for its predecessor: an earlier step wrote it. S^T q of the new S is exp(g) * S^T q +
        (k . q) * u, so one pass over S gives both products and q and k enter before they are
        normed. Value heads that share q and k convolve them each for themselves; the last of them
        moves the window that all have read. No float atomics, so bit-reproducible
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.delta import DeltaState, DeltaWeights
from lowbit.runtime.kernels.delta_gates import gates, gates_ref
from lowbit.runtime.kernels.delta_out import gated_norm_ref, window_ref
from lowbit.runtime.kernels.device import programmatic_launch
from lowbit.runtime.kernels.launch import delta_warps, power_of_two

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
def _sums2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _convolved(inputs, taps):
    """Convolution and SiLU of some channels of the one token, in FP32."""
    y = tl.sum(inputs.to(tl.float32) * taps, axis=1)
    return y * tl.sigmoid(y)


@triton.jit
def _move(window_ptr, channels, inputs, C: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr):
    """The window becomes the last W - 1 inputs [D, COLUMNS]."""
    w = tl.arange(0, COLUMNS)[None, :]
    at = window_ptr + (w - 1) * C + channels[:, None]
    tl.store(at, inputs.to(window_ptr.dtype.element_ty), mask=(w > 0) & (w < W))


@triton.jit
def _recurrence_kernel(
    qkvz_ptr,
    ba_ptr,
    window_ptr,
    memory_ptr,
    taps_ptr,
    decay_ptr,
    dt_bias_ptr,
    gain_ptr,
    arrived_ptr,
    out_ptr,
    l2_eps,
    eps,
    Hk: tl.constexpr,
    Hv: tl.constexpr,
    Dk: tl.constexpr,
    Dv: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    C: tl.constexpr = 2 * Hk * Dk + Hv * Dv
    SHARED: tl.constexpr = Hv // Hk
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    qkvz_ptr += token * (C + Hv * Dv)
    window_ptr += token * (W - 1) * C
    offs_k = tl.arange(0, Dk)
    offs_v = tl.arange(0, Dv)
    of_q = head // SHARED * Dk + offs_k
    of_k = Hk * Dk + of_q
    of_v = 2 * Hk * Dk + head * Dv + offs_v
    tile = memory_ptr + (token * Hv + head) * (Dk * Dv) + offs_k[:, None] * Dv + offs_v[None, :]
    S = tl.load(tile)  # [Dk, Dv]
    w = tl.arange(0, COLUMNS)[None, :]
    q_taps = tl.load(taps_ptr + of_q[:, None] * W + w, mask=w < W, other=0.0)
    k_taps = tl.load(taps_ptr + of_k[:, None] * W + w, mask=w < W, other=0.0)
    v_taps = tl.load(taps_ptr + of_v[:, None] * W + w, mask=w < W, other=0.0)
    q_old = tl.load(window_ptr + w * C + of_q[:, None], mask=w < W - 1, other=0.0)
    k_old = tl.load(window_ptr + w * C + of_k[:, None], mask=w < W - 1, other=0.0)
    v_old = tl.load(window_ptr + w * C + of_v[:, None], mask=w < W - 1, other=0.0)
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    gain = tl.load(gain_ptr + offs_v).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    b = tl.load(ba_ptr + token * (2 * Hv) + head)
    a = tl.load(ba_ptr + token * (2 * Hv) + Hv + head)
    new = w == W - 1  # the column of the token
    q_in = tl.where(new, tl.load(qkvz_ptr + of_q[:, None] + 0 * w, mask=new, other=0.0), q_old)
    k_in = tl.where(new, tl.load(qkvz_ptr + of_k[:, None] + 0 * w, mask=new, other=0.0), k_old)
    v_in = tl.where(new, tl.load(qkvz_ptr + of_v[:, None] + 0 * w, mask=new, other=0.0), v_old)
    z = tl.load(qkvz_ptr + C + head * Dv + offs_v).to(tl.float32)
    beta, g = gates(b, a, decay, dt_bias)
    fade = tl.exp(g)
    q = _convolved(q_in, q_taps)
    k = _convolved(k_in, k_taps)
    v = _convolved(v_in, v_taps)
    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, _sums3)
    Sq, Sk = tl.reduce((S * q[:, None], S * k[:, None]), 0, _sums2)  # [Dv]
    q_norm = tl.rsqrt(qq + l2_eps) * Dk**-0.5
    k_norm = tl.rsqrt(kk + l2_eps)
    u = beta * (v - fade * k_norm * Sk)
    o = q_norm * (fade * Sq + k_norm * qk * u)
    o *= tl.rsqrt(tl.sum(o * o, axis=0) / Dv + eps) * gain
    out = o * z * tl.sigmoid(z)
    tl.store(out_ptr + (token * Hv + head) * Dv + offs_v, out.to(out_ptr.dtype.element_ty))
    tl.store(tile, fade * S + k[:, None] * (k_norm * u)[None, :])
    _move(window_ptr, of_v, v_in, C, W, COLUMNS)
    if SHARED == 1:
        _move(window_ptr, of_q, q_in, C, W, COLUMNS)
        _move(window_ptr, of_k, k_in, C, W, COLUMNS)
    else:
        tl.debug_barrier()  # all threads have read the window
        arrived = arrived_ptr + token * Hk + head // SHARED
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == SHARED - 1:
            tl.store(arrived, 0)  # for the next layer
            _move(window_ptr, of_q, q_in, C, W, COLUMNS)
            _move(window_ptr, of_k, k_in, C, W, COLUMNS)


def delta_decode(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, eps: float, state: DeltaState, layer: int
) -> Tensor:
    """One token of each of B sequences in a gated DeltaNet layer; see `Ops.delta_net`.

    Returns:
        [B, Hv * Dv] in the dtype of qkvz; the state's layer has moved on by the token.
    """
    B = qkvz.shape[0]
    Hv, Dv = weights.value_heads, weights.value_dim
    out = torch.empty((B, Hv * Dv), dtype=qkvz.dtype, device=qkvz.device)
    pdl = programmatic_launch(qkvz)
    _recurrence_kernel[(Hv, B)](
        qkvz,
        ba,
        state.conv[layer],
        state.memory[layer],
        weights.conv,
        weights.decay,
        weights.dt_bias,
        weights.norm,
        state.arrived,
        out,
        L2_EPS,
        eps,
        Hk=weights.key_heads,
        Hv=Hv,
        Dk=weights.key_dim,
        Dv=Dv,
        W=weights.conv.shape[1],
        COLUMNS=power_of_two(weights.conv.shape[1]),
        PDL=pdl,
        num_warps=delta_warps(weights.key_dim * Dv),
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return out
