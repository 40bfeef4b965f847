"""The sums of `metrics` over a block of the vocabulary, as one Triton kernel.

Layout  logits [tokens, rows] FP32 of both models, sums [2, tokens] or [tokens] FP64, ids int64
Plan    a program takes a token and passes over its logits once; eagerly it was some thirty passes
        over FP64 copies of them
Bytes   8 * tokens * rows; two exponentials in FP64 for each row take longer than that
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # rows at a time
WARPS = 4


@triton.jit
def _add_kernel(
    a_ptr, b_ptr, labels_ptr, max_ptr, exp_ptr, label_ptr, square_ptr, top_ptr, other_ptr,
    product_ptr, cross_ptr,
    first_token, first_row, tokens, rows, BLOCK: tl.constexpr,
):  # fmt: skip
    """tokens: of all sums; the block begins at `first_token`."""
    own = tl.program_id(0)
    at_a = first_token + own
    at_b = at_a + tokens
    a_row = a_ptr + own.to(tl.int64) * rows
    b_row = b_ptr + own.to(tl.int64) * rows
    highest_a = tl.load(max_ptr + at_a)
    highest_b = tl.load(max_ptr + at_b)
    exp_a = tl.load(exp_ptr + at_a)
    exp_b = tl.load(exp_ptr + at_b)
    square_a = tl.load(square_ptr + at_a)
    square_b = tl.load(square_ptr + at_b)
    top_a = tl.load(top_ptr + at_a)
    top_b = tl.load(top_ptr + at_b)
    other = tl.load(other_ptr + at_a)
    product = tl.load(product_ptr + at_a)
    cross = tl.load(cross_ptr + at_a)
    for first in range(0, rows, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        inside = offs < rows
        a = tl.load(a_row + offs, inside, 0.0).to(tl.float64)
        b = tl.load(b_row + offs, inside, 0.0).to(tl.float64)
        square_a += tl.sum(a * a, 0)
        square_b += tl.sum(b * b, 0)
        product += tl.sum(a * b, 0)
        difference = a - b
        a = tl.where(inside, a, float("-inf"))
        b = tl.where(inside, b, float("-inf"))
        peak_a, place_a = tl.max(a, 0, return_indices=True)
        peak_b, place_b = tl.max(b, 0, return_indices=True)
        if peak_a > highest_a:
            top_a = (first_row + first + place_a).to(tl.int64)
            other = tl.load(b_row + first + place_a).to(tl.float64)
        if peak_b > highest_b:
            top_b = (first_row + first + place_b).to(tl.int64)
        new_a = tl.maximum(peak_a, highest_a)
        new_b = tl.maximum(peak_b, highest_b)
        e = tl.exp(a - new_a)
        shrink = tl.exp(highest_a - new_a)
        exp_a = exp_a * shrink + tl.sum(e, 0)
        cross = cross * shrink + tl.sum(e * difference, 0)
        exp_b = exp_b * tl.exp(highest_b - new_b) + tl.sum(tl.exp(b - new_b), 0)
        highest_a = new_a
        highest_b = new_b
    label = tl.load(labels_ptr + at_a) - first_row
    here = (label >= 0) & (label < rows)
    tl.store(label_ptr + at_a, tl.load(a_row + label, here, 0.0).to(tl.float64), here)
    tl.store(label_ptr + at_b, tl.load(b_row + label, here, 0.0).to(tl.float64), here)
    tl.store(max_ptr + at_a, highest_a)
    tl.store(max_ptr + at_b, highest_b)
    tl.store(exp_ptr + at_a, exp_a)
    tl.store(exp_ptr + at_b, exp_b)
    tl.store(square_ptr + at_a, square_a)
    tl.store(square_ptr + at_b, square_b)
    tl.store(top_ptr + at_a, top_a)
    tl.store(top_ptr + at_b, top_b)
    tl.store(other_ptr + at_a, other)
    tl.store(product_ptr + at_a, product)
    tl.store(cross_ptr + at_a, cross)


def add(sums: Sequence[Tensor], tokens: slice, first_row: int, a: Tensor, b: Tensor) -> None:
    """As `metrics.LogitSums.add`, on a GPU.

    Args:
        sums: labels, then the sums, in the order of the kernel's arguments; changed in place.
    """
    _add_kernel[(len(a),)](
        a.contiguous(), b.contiguous(), *sums, tokens.start, first_row, len(sums[0]), a.shape[1],
        BLOCK, num_warps=WARPS,
    )  # fmt: skip
