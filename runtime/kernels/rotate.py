"""rotated: per-head RMS norm, gain and rotary embedding (half-split pairs), shared by attention.

n = x * rsqrt(mean(x^2) + eps) * gain
out[d] = n[d] * cos - n[d + D/2] * sin,  out[d + D/2] = n[d + D/2] * cos + n[d] * sin
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.ops import Rope


def rotated_ref(x: Tensor, gain: Tensor, eps: float, rope: Rope, position: int) -> Tensor:
    """The value `rotated` approximates: x [..., D] at one position, in float64."""
    x = x.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.double()
    low, high = x.chunk(2, dim=-1)
    cos, sin = rope.cos[position].double(), rope.sin[position].double()
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@triton.jit
def rotated(x_ptr, gain_ptr, cos_ptr, sin_ptr, heads, inside, position, eps, D: tl.constexpr):
    """Heads of x at one position, normed and rotated: [BLOCK_H, D] float32; D a power of two."""
    offs_d = tl.arange(0, D)
    partner = (offs_d + D // 2) % D
    angle = position * (D // 2) + offs_d % (D // 2)
    cos = tl.load(cos_ptr + angle)
    sin = tl.load(sin_ptr + angle) * tl.where(offs_d < D // 2, -1.0, 1.0)
    mask = inside[:, None]
    x = tl.load(x_ptr + heads[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
    y = tl.load(x_ptr + heads[:, None] * D + partner[None, :], mask=mask, other=0.0)
    x, y = x.to(tl.float32), y.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    x *= factor * tl.load(gain_ptr + offs_d).to(tl.float32)[None, :]
    y *= factor * tl.load(gain_ptr + partner).to(tl.float32)[None, :]
    return x * cos[None, :] + y * sin[None, :]
