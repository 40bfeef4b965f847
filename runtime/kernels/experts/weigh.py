"""experts_weigh: weighted sum of the expert outputs of each token.

    y[b] = x[b] + sum_s share[b, s] * part[b * slots + s]

Layout  parts [M * slots, N] fp32, shares [M, slots] fp32, x [M, N] -> y [M, N] in x's dtype
Plan    in the order of slots, each added by one fused operation, as `experts_down` does it
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import programmatic_launch, run
from lowbit.runtime.kernels.ptx.mma import threads

WARPS = 4  # of a program


@gluon.jit(do_not_specialize=["N"])
def _experts_weigh_kernel(
    parts_ptr, shares_ptr, x_ptr, y_ptr, N,
    SLOTS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A column of a token for each lane."""
    warp, lane, zero, zero_f32 = threads(WARPS)
    n = (gl.program_id(0) * WARPS + warp) * 32 + lane
    there = n < N
    n = gl.minimum(n, N - 1)
    token = (gl.program_id(1) + zero).to(gl.int64)
    added = gl.load(x_ptr + token * N + n).to(gl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    parts = ()
    for slot in gl.static_range(SLOTS):
        parts = parts + (gl.load(parts_ptr + (token * SLOTS + slot) * N + n),)
    total = zero_f32
    for slot in gl.static_range(SLOTS):
        total = gl.fma(gl.load(shares_ptr + token * SLOTS + slot), parts[slot], total)
    gl.store(y_ptr + token * N + n, (total + added).to(y_ptr.dtype.element_ty), mask=there)


def weighed(parts: Tensor, shares: Tensor, x: Tensor) -> Tensor:
    """The weighted sum of every token's parts, added to it: [M, N] in x's dtype.

    Args:
        parts: [M * slots, N] float32.
        shares: [M, slots] float32.
        x: [M, N], the residual.
    """
    (M, N), pdl = x.shape, programmatic_launch(x)
    y = torch.empty_like(x)
    run(
        _experts_weigh_kernel,
        (-(-N // (32 * WARPS)), M),
        parts,
        shares,
        x,
        y,
        N,
        SLOTS=shares.shape[1],
        WARPS=WARPS,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return y
