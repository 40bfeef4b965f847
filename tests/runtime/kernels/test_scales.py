"""Scales of other tools, FP16 and FP32: every kernel takes them as they are."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.gemm import gemm, gemm_ref
from lowbit.runtime.kernels.gemv import gemv, gemv_ref, gemv_swiglu, gemv_swiglu_ref
from lowbit.runtime.linear import PackedLinear

MakePacked = Callable[[int, int, int, int], PackedLinear]
Randn = Callable[..., Tensor]
ERROR = {4: 2e-5, 8: 1e-6}  # FP32 rounding; a scale rounded to BF16 would be off by 1e-3


@pytest.fixture
def make_scaled(make_packed: MakePacked) -> Callable[[int, torch.dtype], PackedLinear]:
    """(bits, dtype) to a weight whose scales BF16 cannot hold."""

    def make(bits: int, dtype: torch.dtype) -> PackedLinear:
        w = make_packed(bits, 34, 256, 64)
        scales = (w.scales.float() * 1.0029).to(dtype)
        assert not torch.equal(scales.bfloat16().to(dtype), scales)
        return replace(w, scales=scales)

    return make


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_kernels_take_scales_of_other_dtypes(
    make_scaled: Callable[[int, torch.dtype], PackedLinear],
    randn: Randn,
    bits: int,
    dtype: torch.dtype,
) -> None:
    w, x, several = make_scaled(bits, dtype), randn(1, 256), randn(5, 256)
    close(gemv(x, w, dtype=torch.float32), gemv_ref(x, w), ERROR[bits])
    close(gemm(several, w, dtype=torch.float32), gemm_ref(several, w), ERROR[bits])
    norm = 1 + randn(256)
    close(gemv_swiglu(x, norm, 1e-6, w), gemv_swiglu_ref(x, norm, 1e-6, w), 2.0**-7)


def close(y: Tensor, ref: Tensor, bound: float) -> None:
    assert float((y.double() - ref).norm() / ref.norm()) < bound
