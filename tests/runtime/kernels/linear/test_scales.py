"""Scales of other tools, FP16 and FP32: every kernel takes them as they are."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from lowbit.runtime.kernels.linear.gemv import gemv, gemv_ref
from lowbit.runtime.kernels.linear.tiles import TiledLinear, tiled
from lowbit.runtime.kernels.linear.widen import widen, widen_ref
from lowbit.runtime.weights.linear import PackedLinear

pytestmark = pytest.mark.gpu

MakePacked = Callable[[int, int, int, int], PackedLinear]
MakeScaled = Callable[..., TiledLinear]
Randn = Callable[..., Tensor]

SUMS = 1e-5  # see test_gemv
ERROR = 1e-6  # FP32 rounding; a scale rounded to BF16 would be off by 1e-3
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
BITS = pytest.mark.parametrize("bits", [2, 3, 4, 8])


@pytest.fixture
def make_scaled(make_packed: MakePacked) -> MakeScaled:
    """(bits, dtype, paired) to a weight whose scales BF16 cannot hold."""

    def make(bits: int, dtype: torch.dtype, paired: bool = False) -> TiledLinear:
        w = make_packed(bits, 34, 256, 64)
        scales = (w.scales.float() * 1.0029).to(dtype)
        rounded = replace(w, scales=scales.bfloat16())
        w = replace(w, scales=scales)
        # The bound below can tell one from the other.
        off = (rounded.dequantized() - w.dequantized()).norm() / w.dequantized().norm()
        assert float(off) > 10 * SUMS
        return tiled(w, paired)

    return make


@BITS
@DTYPES
def test_gemv(make_scaled: MakeScaled, randn: Randn, bits: int, dtype: torch.dtype) -> None:
    w = make_scaled(bits, dtype)
    for tokens in (1, 5):
        x = randn(tokens, 256)
        close(gemv(x, w, dtype=torch.float32), gemv_ref(x, w), SUMS)
        pair = make_scaled(bits, dtype, paired=True)
        gate, up = gemv_ref(x, pair).chunk(2, -1)
        close(gemv(x, pair, dtype=torch.float32), silu(gate) * up, 2 * SUMS)


@BITS
@DTYPES
def test_widen(make_scaled: MakeScaled, bits: int, dtype: torch.dtype) -> None:
    """One rounding, of the product: not of the scale before it."""
    w = make_scaled(bits, dtype)
    assert torch.equal(widen(w), widen_ref(w))


def close(y: Tensor, ref: Tensor, bound: float) -> None:
    assert float((y.double() - ref).norm() / ref.norm()) < bound
