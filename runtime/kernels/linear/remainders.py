"""remainders: what a head takes in mode `int8`: each token and what its codes leave of it.

    y[2 t] = bf16(x[t] * rsqrt(mean(x[t]^2) + eps) * gain)
    y[2 t + 1] = bf16(y[2 t] - q * s)    with the codes and scales that `quantize` makes of y[2 t]

Layout  x [M, K] bf16, gain [K] -> [2 * M, K] bf16
Bytes   some rows, from L2
Plan    a program takes a token
Bits    the products of both rows in eight bits add up to that of y[2 t] but for 2^-15 of a group's
        largest element, and depend on nothing but the token: so logits of any number of tokens have
        the bits of a lone one, where products of exact inputs would cost three digits each
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.formats.activations import LARGEST_CODE, SMALLEST_PEAK
from lowbit.runtime.kernels.launch.device import programmatic_launch, run

SMALLEST = tl.constexpr(SMALLEST_PEAK)
LARGEST = tl.constexpr(float(LARGEST_CODE))
INVERSE = tl.constexpr(1 / LARGEST_CODE)
NEAREST = tl.constexpr(1.5 * 2.0**23)  # added and taken away, rounds a small FP32 to an integer


@triton.jit
def _remainders_kernel(
    x_ptr, gain_ptr, y_ptr, K, eps, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < K
    gain = tl.load(gain_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + token * K + at, mask=mask, other=0.0).to(tl.float32)
    kind: tl.constexpr = y_ptr.dtype.element_ty
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * gain).to(kind)
    wide = tl.reshape(normed.to(tl.float32), (BLOCK // GROUP, GROUP))
    peaks = tl.maximum(tl.max(tl.abs(wide), axis=1), SMALLEST)
    codes = wide * tl.div_rn(tl.full(peaks.shape, LARGEST, tl.float32), peaks)[:, None]
    codes = (codes + NEAREST) - NEAREST
    scales = ((peaks * INVERSE).to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
    left = tl.reshape(wide - codes * scales[:, None], (BLOCK,)).to(kind)
    tl.store(y_ptr + 2 * token * K + at, normed, mask=mask)
    tl.store(y_ptr + (2 * token + 1) * K + at, left, mask=mask)


def with_remainders(x: Tensor, group: int, norm: Tensor, eps: float) -> Tensor:
    """Normed tokens and what their codes leave: [M, K] bfloat16 to [2 * M, K].

    Args:
        group: elements along K that share a scale, a power of two.
        norm: [K] gain of the RMS norm.
    """
    M, K = x.shape
    y = torch.empty((2 * M, K), dtype=x.dtype, device=x.device)
    pdl = programmatic_launch(x)
    run(
        _remainders_kernel,
        (M,),
        x,
        norm,
        y,
        K,
        eps,
        GROUP=group,
        BLOCK=triton.next_power_of_2(K),
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
        enable_fp_fusion=False,  # codes are those of `quantize`, which rounds each product
    )
    return y
