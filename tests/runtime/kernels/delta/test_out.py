"""The norm of decoded heads, against float64."""

import pytest
import torch

from lowbit.runtime.kernels.delta.out import norm_heads
from lowbit.runtime.kernels.delta.reference import norm_heads_ref
from lowbit.runtime.kernels.linear.norm import SQUARES
from tests.runtime.kernels.delta.layers import EPS, relative_error


@pytest.mark.parametrize("M", [1, 5])
def test_norm_heads(device: str, bf16_error: float, M: int) -> None:
    parts = torch.randn(M, 6 * 32, device=device)
    squares = torch.rand(M, 6, SQUARES, device=device)
    expected = norm_heads_ref(parts, squares, EPS)
    out = norm_heads(parts, squares, EPS, torch.bfloat16)
    assert relative_error(out, expected) < bf16_error
