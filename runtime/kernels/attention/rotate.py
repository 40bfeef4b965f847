"""rotated: per-head RMS norm, gain and rotary embedding (half-split pairs), shared by attention.

n = x * rsqrt(mean(x^2) + eps) * gain                                (x itself without a gain)
out[d] = n[d] * cos - n[d + R/2] * sin,  out[d + R/2] = n[d + R/2] * cos + n[d] * sin
for d < R/2, R the rotated dimensions; the other D - R of n pass through
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.state.rope import Rope


def rotated_ref(x: Tensor, gain: Tensor | None, eps: float, rope: Rope, position: int) -> Tensor:
    """The value `rotated` approximates: x [..., D] at one position, in float64."""
    x = x.double()
    if gain is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.double()
    cos, sin = rope.cos[position].double(), rope.sin[position].double()
    half = cos.shape[0]
    low, high, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


@triton.jit
def rotated(
    x_ptr,
    gain_ptr,
    cos_ptr,
    sin_ptr,
    starts,
    inside,
    position,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
):
    """Heads of x at one position, normed and rotated: [BLOCK_H, D] float32.

    starts [BLOCK_H] is each head's first element; D is a power of two, R even.
    """
    offs_d = tl.arange(0, D)
    turns = offs_d < R
    partner = tl.where(turns, (offs_d + R // 2) % R, offs_d)
    angle = position * (R // 2) + offs_d % (R // 2)
    cos = tl.where(turns, tl.load(cos_ptr + angle), 1.0)
    sin = tl.load(sin_ptr + angle) * tl.where(offs_d < R // 2, -1.0, tl.where(turns, 1.0, 0.0))
    mask = inside[:, None]
    x = tl.load(x_ptr + starts[:, None] + offs_d[None, :], mask=mask, other=0.0)
    y = tl.load(x_ptr + starts[:, None] + partner[None, :], mask=mask, other=0.0)
    x, y = x.to(tl.float32), y.to(tl.float32)
    if gain_ptr is not None:
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x *= factor * tl.load(gain_ptr + offs_d).to(tl.float32)[None, :]
        y *= factor * tl.load(gain_ptr + partner).to(tl.float32)[None, :]
    return x * cos[None, :] + y * sin[None, :]
