"""Patches' queries and keys turned by the kernel, beside the vision tower's plain operations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.rotate_patches import rotate_patches
from lowbit.runtime.models.vision import rotate

Randn = Callable[..., Tensor]


@pytest.mark.parametrize(("patches", "heads", "D"), [(1, 1, 8), (5, 16, 72), (9, 3, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_turn_as_by_plain_operations(
    randn: Randn, device: str, bf16_error: float, patches: int, heads: int, D: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    qkv = randn(patches, 3, heads, D).to(dtype)
    angles = 100 * randn(patches, D // 2).float()
    cos, sin = angles.cos(), angles.sin()
    expected = [rotate(part, cos, sin) for part in qkv[:, :2].double().unbind(1)]
    values = qkv[:, 2].clone()
    rotate_patches(qkv, cos, sin)
    assert torch.equal(qkv[:, 2], values)
    error = bf16_error if dtype == torch.bfloat16 else 2.0**-22
    for found, turned in zip(qkv.unbind(1), expected, strict=False):
        size = turned.square() + turned.roll(D // 2, -1).square()  # of the pair
        assert ((found - turned).abs() <= error * size.sqrt()).all()
