"""gated_norm: the end of a gated DeltaNet layer, for a prompt.

Tokens of several sequences have it in `delta_decode`, one of one sequence in its output linear.

    out[m, h] = o[m, h] * rsqrt(mean(o[m, h]^2) + eps) * gain * silu(z[m, h])       (per head, FP32)
    window    = the last W - 1 inputs of the convolution, of old window and new tokens together

Layout  o [M, Hv * Dv] fp32, qkvz [M, C + Hv * Dv] bf16, z after the channels; out [M, Hv * Dv] bf16
Plan    a program per token and head. The window moves here and nowhere else: kernels before this
        one read it from many programs, so none of them may write it. Token 0's programs share the
        channels out among them; a channel's rows are moved by one thread, oldest first
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.kernels.device import run
from lowbit.runtime.state.delta import DeltaWeights


def gated_norm_ref(o: Tensor, qkvz: Tensor, weights: DeltaWeights, eps: float) -> Tensor:
    """The value `gated_norm` approximates: [M, Hv * Dv] float64; the window is not moved."""
    shape = (o.shape[0], weights.value_heads, weights.value_dim)
    o, z = o.double().view(shape), qkvz[:, weights.conv.shape[0] :].double().reshape(shape)
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * weights.norm.double()
    return (normed * torch.nn.functional.silu(z)).view(o.shape[0], -1)


def window_ref(qkvz: Tensor, window: Tensor) -> Tensor:
    """The window [W - 1, C] after the tokens of qkvz."""
    rows, C = window.shape
    return torch.cat((window, qkvz[:, :C].to(window.dtype)))[-rows:]


@triton.jit(do_not_specialize_on_alignment=["M"])
def _gated_norm_kernel(
    o_ptr,
    qkvz_ptr,
    gain_ptr,
    window_ptr,
    out_ptr,
    M,
    eps,
    C: tl.constexpr,
    Dv: tl.constexpr,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Hv = tl.num_programs(1)
    stride = C + Hv * Dv
    offs_d = head * Dv + tl.arange(0, Dv)
    gain = tl.load(gain_ptr + tl.arange(0, Dv)).to(tl.float32)
    o = tl.load(o_ptr + token * Hv * Dv + offs_d)
    z = tl.load(qkvz_ptr + token * stride + C + offs_d).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, axis=0) / Dv + eps) * gain
    out = o * z * tl.sigmoid(z)
    tl.store(out_ptr + token * Hv * Dv + offs_d, out.to(out_ptr.dtype.element_ty))
    if token == 0:
        offs_c = head * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = offs_c < C
        for row in tl.static_range(W - 1):
            source = tl.zeros([BLOCK_C], tl.int64) + M + row  # of the old window, then the tokens
            held = source < W - 1
            old = tl.load(window_ptr + source * C + offs_c, mask=inside & held, other=0.0)
            tokens = qkvz_ptr + (source - (W - 1)) * stride
            new = tl.load(tokens + offs_c, mask=inside & (source >= W - 1), other=0.0)
            moved = tl.where(held, old, new.to(old.dtype))
            tl.store(window_ptr + row * C + offs_c, moved, mask=inside)


def gated_norm(
    o: Tensor, qkvz: Tensor, weights: DeltaWeights, eps: float, window: Tensor
) -> Tensor:
    """Gated RMS norm of every head, after which the window holds the tokens of qkvz.

    Args:
        o: [M, Hv * Dv] float32, the recurrence's output.
        qkvz: [M, C + Hv * Dv], inputs of the convolution and then z.
        weights: of the layer; Dv is a power of two.
        eps: of the norm.
        window: [W - 1, C], updated in place.

    Returns:
        [M, Hv * Dv] in the dtype of qkvz.
    """
    M, Hv = o.shape[0], weights.value_heads
    C, W = weights.conv.shape
    out = torch.empty(o.shape, dtype=qkvz.dtype, device=qkvz.device)
    run(
        _gated_norm_kernel,
        (M, Hv),
        o,
        qkvz,
        weights.norm,
        window,
        out,
        M,
        eps,
        C=C,
        Dv=weights.value_dim,
        W=W,
        BLOCK_C=triton.next_power_of_2(triton.cdiv(C, Hv)),
        num_warps=1,
        enable_fp_fusion=True,
    )
    return out
