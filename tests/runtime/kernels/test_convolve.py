"""Convolutions of a drafter's blocks: the kernel, and plain torch, against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.runtime.backends.cpu import convolve as convolve_by_torch
from lowbit.runtime.kernels.convolve import convolve, convolve_ref

Randn = Callable[..., Tensor]
SIZES = [
    (16, 2, 8, 64, 16),
    (7, 2, 7, 600, 8),
    (9, 4, 3, 96, 96),
    (2, 1, 1, 32, 1),
    (6, 5, 3, 64, 2),
]


@pytest.mark.parametrize(("M", "taps", "size", "h", "group"), SIZES)
@pytest.mark.parametrize(("side", "added"), [(0, False), (1, True)])
def test_convolve(
    randn: Randn, M: int, taps: int, size: int, h: int, group: int, side: int, added: bool
) -> None:
    """Blocks of a power of two and of none, more taps than tokens, and a lone token."""
    x, base = randn(M, h), randn(2, taps, h)
    own, residual = randn(M, 2 * taps * (h // group)), randn(M, h) if added else None
    ref = convolve_ref(x, own, base, side, size, residual)
    for found in (
        convolve(x, own, base, side, size, residual),
        convolve_by_torch(x, own, base, side, size, residual),
    ):
        assert found.dtype == torch.bfloat16
        assert (found.double() - ref).abs().max() < 2.0**-7 * ref.abs().max()


def test_a_block_sees_no_other(randn: Randn) -> None:
    x, base, own = randn(8, 64), randn(2, 2, 64), randn(8, 16)
    first = convolve(x, own, base, 0, 4)
    x[3] = 100
    again = convolve(x, own, base, 0, 4)
    assert torch.equal(first[4:], again[4:])
    assert not torch.equal(first[3], again[3])
