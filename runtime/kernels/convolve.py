"""convolve: convolution of the tokens of each block of a drafter, by taps that each token shifts.

    y[m, c] = sum_t (base[side, t, c] + coefficients[m, side, t, group of c]) * x[m - t, c]

Layout  x [M, h] bf16, blocks of `size` tokens side by side; coefficients [M, 2 * T * G] and base
        [2, T, h] bf16 -> y [M, h]
Fused   a residual, added in FP32 before the one rounding
Bytes   2 * h * (T + 1) a token from L2, and base: next to nothing
Plan    A program per token and BLOCK channels; a tap that would reach before the block is left out.
        No atomics
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import programmatic_launch, run

BLOCK = 512


def convolve_ref(
    x: Tensor,
    coefficients: Tensor,
    base: Tensor,
    side: int,
    size: int,
    added: Tensor | None = None,
) -> Tensor:
    """The value `convolve` approximates: [M, h] float64."""
    (M, h), (_, taps, _) = x.shape, base.shape
    groups = coefficients.shape[1] // (2 * taps)
    out = torch.zeros(M, h, dtype=torch.float64, device=x.device)
    if added is not None:
        out += added.double()
    own = coefficients.view(M, 2, taps, groups).double().repeat_interleave(h // groups, dim=3)
    for token in range(M):
        for tap in range(min(taps, token % size + 1)):
            kernel = base[side, tap].double() + own[token, side, tap]
            out[token] += kernel * x[token - tap].double()
    return out


@triton.jit
def _convolve_kernel(
    x_ptr, coefficients_ptr, base_ptr, added_ptr, y_ptr, h,
    SIDE: tl.constexpr, SIZE: tl.constexpr, TAPS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SIZE: tokens of a block; GROUP: channels of a group."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < h
    place = tl.program_id(0) % SIZE
    coefficients_ptr += (2 * token + SIDE) * TAPS * (h // GROUP) + channel // GROUP
    base_ptr += SIDE * TAPS * h + channel
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y = tl.zeros([BLOCK], tl.float32)
    if added_ptr is not None:
        y = tl.load(added_ptr + token * h + channel, mask=there, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        seen = channel < tl.where(place >= tap, h, 0)
        x = tl.load(x_ptr + (token - tap) * h + channel, mask=seen, other=0.0).to(tl.float32)
        kernel = tl.load(base_ptr + tap * h, mask=seen, other=0.0).to(tl.float32)
        own = tl.load(coefficients_ptr + tap * (h // GROUP), mask=seen, other=0.0)
        y += (kernel + own.to(tl.float32)) * x
    tl.store(y_ptr + token * h + channel, y.to(y_ptr.dtype.element_ty), mask=there)


def convolve(
    x: Tensor,
    coefficients: Tensor,
    base: Tensor,
    side: int,
    size: int,
    added: Tensor | None = None,
) -> Tensor:
    """Convolve the tokens of each block; see `DraftOps.convolve`."""
    (M, h), taps = x.shape, base.shape[1]
    groups = coefficients.shape[1] // (2 * taps)
    y, pdl = torch.empty_like(x), programmatic_launch(x)
    run(
        _convolve_kernel,
        (M, triton.cdiv(h, BLOCK)),
        *(x, coefficients, base, added, y, h),
        SIDE=side,
        SIZE=size,
        TAPS=taps,
        GROUP=h // groups,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return y
