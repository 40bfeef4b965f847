"""The scale search of formats.layout.rtn on a GPU: the same bits in one kernel.

Layout  w [groups, G] FP32, extreme [groups, 1] FP32 -> scale [groups, 1] BF16; G a power of two
Plan    a program takes ROWS groups and tries every ratio on them in registers, so that the weights
        are read once; element by element it was 250 passes over them
Bits    every operation is one that IEEE 754 fixes, none is fused, and a group's sum is the pairwise
        sum of rtn: columns are loaded in bit-reversed order, so that the halves it adds are
        neighbours at every level
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.layout.rtn import SCALE_DTYPE, ratio_factors

ELEMENTS = 4096  # of a program
WARPS = 4
# Adding and subtracting 1.5 * 2^23 rounds half to even, as torch.round does, for |x| < 2^22.
ROUND: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def rounded(x, code_min, code_max):
    """The nearest code, ties to even."""
    # Clamped first: beyond 2^22 the sum would not round to a whole number.
    x = tl.minimum(tl.maximum(x, code_min - 1.0), code_max + 1.0)
    x = (x + ROUND) - ROUND
    return tl.minimum(tl.maximum(x, code_min), code_max)


@triton.jit
def _pairwise_sum(x, ROWS: tl.constexpr, G: tl.constexpr, LEVELS: tl.constexpr):
    for level in tl.static_range(LEVELS):
        x = tl.reshape(x, (ROWS, G >> (level + 1), 2))
        first, second = tl.split(x)
        x = first + second
    return tl.reshape(x, (ROWS,))


@triton.jit
def _stored(x):
    # To the nearest BF16, ties to even, in integers: Triton's interpreter would cut bits off.
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _search_kernel(
    w_ptr, extreme_ptr, importance_ptr, order_ptr, factors_ptr, scale_ptr,
    groups, column_groups, half, first_factor,
    COUNT: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr, LEVELS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = offs < groups
    columns = tl.load(order_ptr + tl.arange(0, G))
    w = tl.load(w_ptr + offs[:, None].to(tl.int64) * G + columns[None, :], mask[:, None], 0.0)
    if WEIGHTED:
        block = (offs % column_groups) * G
        importance = tl.load(importance_ptr + block[:, None] + columns[None, :])
    extreme = tl.load(extreme_ptr + offs, mask, 1.0)
    best = _stored(extreme * first_factor)
    best_error = tl.full((ROWS,), float("inf"), tl.float32)
    for i in range(COUNT):
        scale = _stored(extreme * tl.load(factors_ptr + i))
        q = rounded(w * tl.div_rn(1.0, scale)[:, None], -half, half - 1)
        error = q * scale[:, None] - w
        error = error * error
        if WEIGHTED:
            error = error * importance
        total = _pairwise_sum(error, ROWS, G, LEVELS)
        better = total < best_error
        best_error = tl.where(better, total, best_error)
        best = tl.where(better, scale, best)
    tl.store(scale_ptr + offs, best, mask)


def search(w: Tensor, extreme: Tensor, half: int, importance: Tensor | None) -> Tensor:
    """The scale among the ratios with the smallest squared error, per group: [groups, 1] bfloat16.

    Args:
        w: [groups, G] float32 on a GPU; G is a power of two, at least 2.
        extreme: [groups, 1] float32.
        importance: [column groups, G] float32, for groups in turn; None where all count alike.
    """
    groups, G = w.shape
    first, *factors = ratio_factors(half)
    scale = torch.empty(groups, 1, device=w.device)
    rows = max(1, ELEMENTS // G)
    weights = w if importance is None else importance.contiguous()
    _search_kernel[(triton.cdiv(groups, rows),)](
        w, extreme, weights, _bit_reversed(G, w.device), _on(w.device, *factors), scale,
        groups, len(weights), float(half), first,
        len(factors), rows, G, G.bit_length() - 1, importance is not None,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return scale.to(SCALE_DTYPE)


@cache
def _bit_reversed(G: int, device: torch.device) -> Tensor:
    bits = G.bit_length() - 1
    order = [int(format(i, f"0{bits}b")[::-1], 2) for i in range(G)]
    return torch.tensor(order, dtype=torch.int32, device=device)


@cache
def _on(device: torch.device, *values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
