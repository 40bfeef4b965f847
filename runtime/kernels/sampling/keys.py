"""Sortable keys of logits: one int64 that orders by value, then by the lower token id.

The upper half is the value as a signed integer, the lower half the id counted down. -0 counts as 0
and NaN, whatever its sign, stands above all. Device functions serve Gluon kernels too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(1024)  # logits of a program
GROUP = tl.constexpr(64)  # logits of which the best is ranked
LOWEST = tl.constexpr(-(2**63))  # below every key


@triton.jit
def key_of(x, id):
    """Keys of FP32 logits and the ids of their tokens."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(x != x, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - id).to(tl.int64)


@triton.jit
def id_of(key):
    """Ids of the tokens that keys are of: int32."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def value_of(key):
    """The FP32 logits that keys are of."""
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


def keys_of(scores: Tensor, ids: Tensor) -> Tensor:
    """`key_of` in PyTorch, of scores [M, N] float32 and their tokens' ids: [M, N] int64."""
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = ordered.masked_fill(scores.isnan(), 0x7FFFFFFF)
    return (ordered.long() << 32) | (0x7FFFFFFF - ids)
