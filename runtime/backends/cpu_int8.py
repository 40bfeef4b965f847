"""Packed linears with inputs in eight bits on a CPU: the products of `formats.activations`.

Codes of weights and of inputs are widened to FP32, some groups at a time, and multiplied there: any
order of these sums is exact, since every partial sum of a group is an integer below 2^24, on
processors that multiply in BF16 too. PyTorch's own products of INT8 took longer on AVX2, and may
saturate there.

The groups are added in FP64, which holds the product of two FP32 numbers exactly, and each sum is
rounded to FP32. That differs from the one rounding of an `fma` only where FP64 rounds to the middle
of two FP32 numbers, about once in 2^29 additions. Where a token has one scale, FP64 holds all of a
sum exactly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.activations import (
    activation_group,
    centres,
    integer_scales,
    quantize_activations,
    row_bounds,
    squared_norms,
    token_bounds,
)
from lowbit.formats.layout.packing import unpack
from lowbit.runtime.weights.linear import PackedLinear

CHUNK_ROWS = 256  # unpacked at a time at load
WIDE_CODES = 1 << 20  # widened at a time: 4 MB, of as many groups and rows as fit
WIDE_SUMS = 1 << 18  # made at a time: 2 MB in FP64
LEAST_ROWS = 64  # multiplied at a time, however many tokens there are


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """Weight [N, K] whose inputs are rounded to eight bits, by the groups of the inputs."""

    codes: Tensor  # [groups, N, A] int8, zeros behind the end of K
    scales: Tensor  # [groups, N] float32; multiples of `integer_scales` where `whole`
    rows: Tensor  # [N] float32, of `row_bounds`; units of `integer_scales` where `whole`
    K: int
    whole: bool = False  # whether inputs have one scale a token

    @property
    def size_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return self.codes.nbytes + self.scales.nbytes + self.rows.nbytes


def grouped_bytes(N: int, K: int, group_size: int) -> int:
    """Bytes that `grouped` keeps for a packed weight [N, K] in groups of a size."""
    group = activation_group(group_size, K)
    groups = -(-K // group)
    return N * (groups * (group + torch.float32.itemsize) + torch.float32.itemsize)


def grouped(w: PackedLinear, whole: bool = False) -> GroupedCodes:
    """The form of a packed weight for inputs in eight bits; whole: with one scale a token."""
    group = activation_group(w.group_size, w.K)
    groups = -(-w.K // group)
    codes = torch.zeros(groups, w.N, group, dtype=torch.int8)
    scales, rows = torch.empty(w.scales.shape), torch.empty(w.N)
    for start in range(0, w.N, CHUNK_ROWS):
        own = slice(start, start + CHUNK_ROWS)
        part = unpack(w.codes[own], w.bits, w.K)
        codes[:, own] = _in_groups(part, group)
        if whole:
            scales[own], rows[own] = integer_scales(part, w.scales[own], w.bits)
        else:
            scales[own] = w.scales[own]
            rows[own] = row_bounds(squared_norms(part, w.scales[own]), groups)
    starts = torch.arange(0, w.K, group)
    return GroupedCodes(codes, scales.T[starts // w.group_size].contiguous(), rows, w.K, whole)


def grouped_product(
    x: Tensor, w: GroupedCodes, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """`rms_norm(x) @ w.T` with x rounded to eight bits: [M, K] to [M, N] float32.

    Where there is a norm, x is multiplied by its gain and rounded to x's dtype before it becomes
    codes, and the norm's factor multiplies the result.
    """
    if norm is None:
        return _product(x, w)
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _product((wide * norm.float()).to(x.dtype), w).mul_(factor)


def _product(x: Tensor, w: GroupedCodes) -> Tensor:
    groups, N, group = w.codes.shape
    q, s = quantize_activations(x, w.K if w.whole else group)
    codes, parts = _in_groups(q, group).float(), s.T.double()[:, :, None]  # [groups, M, A]
    y = torch.zeros(len(x), N)
    step = min(N, max(LEAST_ROWS, WIDE_SUMS // len(x)))
    together = max(1, min(WIDE_CODES // (step * group), WIDE_SUMS // (step * len(x))))
    bounds = None if w.whole else token_bounds(q, s, group)
    for start in range(0, N, step):
        own = slice(start, start + step)
        centre = None if bounds is None else centres(w.rows[own], bounds)
        total = y[:, own].double() if centre is None else centre.clone()
        for first in range(0, groups, together):
            part = slice(first, first + together)
            sums = torch.bmm(codes[part], w.codes[part, own].float().transpose(1, 2))
            scales = w.scales[part, None, own]
            if w.whole:
                products = sums.double().mul_(scales)
            else:
                products = sums.mul_(scales).double().mul_(parts[part])
            for product in products:
                torch.add(product, total, out=total)
        y[:, own] = total if centre is None else total - centre
    return y.mul_(w.rows).mul_(s) if w.whole else y


def _in_groups(codes: Tensor, group: int) -> Tensor:
    """Codes [R, K] as [groups, R, group], with zeros behind the end of K."""
    R, K = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -K % group))
    return padded.view(R, -1, group).transpose(0, 1)
