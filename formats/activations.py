"""Inputs of linears as INT8: one FP32 scale for each token and group along K. The reference.

In mode `int8` every packed linear but the head takes its input x [M, K] in eight bits; `exact` is
the default. A group of x has `activation_group` elements and lies within one group of the weight;
the last group of a row may be short. In FP32, for each token and group:

    m = max(max|x|, 2^-100)
    q = rint(x * (127 / m)), halves to even
    s = m * fp32(1 / 127)

A group of zeros has codes 0. A group with NaN or an infinity has scale NaN and codes 0, so every
output of its token is NaN.

The product adds the groups in one chain in order of k, whatever the number of tokens:

    y = 0
    y = fma(fp32(sum(code * q) * weight_scale), s, y)    for each group

The sum of a group is an exact integer below 2^24. So a token's result has the same bits in any
company, chunk and tile.
"""

import math

import torch
from torch import Tensor

GROUP = 128  # elements of x that share a scale, where the weight's groups allow it
LARGEST_CODE = 127
SMALLEST_PEAK = 2.0**-100  # the reciprocal of a smaller one would overflow


def activation_group(group_size: int, K: int) -> int:
    """Elements of x that share a scale.

    Args:
        group_size: weights along K that share a scale; K or more for one scale a row.

    >>> [activation_group(size, 1024) for size in (32, 64, 128, 256, 512, 1024)]
    [32, 64, 128, 128, 128, 128]
    """
    return GROUP if group_size >= K else math.gcd(group_size, GROUP)


def quantize_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of inputs.

    Args:
        x: [M, K] BF16 or FP32.
        group: elements along K that share a scale; the last group may be short.

    Returns:
        [M, K] int8 codes and [M, ceil(K / group)] float32 scales.
    """
    M, K = x.shape
    wide = torch.nn.functional.pad(x.float(), (0, -K % group)).view(M, -1, group)
    peaks = wide.abs().amax(-1)  # NaN where any is NaN
    finite = peaks < torch.inf
    used = torch.where(finite, peaks, 1.0).clamp(min=SMALLEST_PEAK)
    # A tensor over a tensor: PyTorch divides a number by a tensor through the reciprocal.
    inverses = torch.full_like(used, LARGEST_CODE) / used
    codes = torch.where(finite[..., None], wide * inverses[..., None], 0.0).round()
    scales = torch.where(finite, used * (1 / LARGEST_CODE), torch.nan)
    return codes.to(torch.int8).view(M, -1)[:, :K].contiguous(), scales


def dequantize_activations(q: Tensor, s: Tensor, group: int) -> Tensor:
    """The inputs that codes stand for: `q * s`, [M, K] float32; see `quantize_activations`."""
    return q.float() * s.repeat_interleave(group, dim=1)[:, : q.shape[1]]


def grouped_product_ref(q: Tensor, s: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Product of rounded inputs with a packed weight, by the chain that the module states.

    Args:
        q: [M, K] int8, of `quantize_activations` in groups of `activation_group`.
        s: [M, groups] float32.
        codes: [N, K] int8 of the weight.
        scales: [N, K / G] of the weight, in a float dtype; [N, 1] for one scale a row.

    Returns:
        [M, N] float32, neither times a norm's factor nor added to anything.
    """
    K = q.shape[1]
    group_size = K // scales.shape[1]
    group = activation_group(group_size, K)
    y = torch.zeros(len(q), len(codes), dtype=torch.float32, device=q.device)
    for number, start in enumerate(range(0, K, group)):
        part = slice(start, start + group)
        sums = q[:, part].double() @ codes[:, part].double().T  # exact
        t = (sums * scales[:, start // group_size].double()).float()
        y = fma(t, s[:, number, None], y)
    return y


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` of FP32 numbers, rounded to FP32 once.

    FP64 holds the product exactly. Its sum with c is rounded to odd, after which the rounding to
    FP32 gives what one rounding would.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # exact: the two-sum of Knuth
    even = total.view(torch.int64) & 1 == 0
    towards = torch.copysign(torch.full_like(error, torch.inf), error)
    odd = torch.nextafter(total, towards)
    inexact = (error != 0) & error.isfinite() & even
    return torch.where(inexact, odd, total).float()
