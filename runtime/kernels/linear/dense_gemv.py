"""dense_gemv: y[b, n] = sum_k w[n, k] * x[b, k]     (few tokens, BF16 weights, FP32 sums).

Layout  w [N, K] and x [B, K] bf16 -> y [B, N]
Fused   RMS norm of x: x * gain is rounded to bf16 and rsqrt(mean(x^2) + eps) multiplies the result;
        residual + y or bias + y
Bytes   2*N*K;  N = 248320, K = 1024 (the head of a tied model): 509 MB = 112 us at 4.56 TB/s
Plan    a program takes 16 rows, its warps a part of K each (`gemv_rows`); every weight is read
        once; no atomics, so bit-reproducible, and a token has the same bits in any company
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.kernels.launch.device import (
    STATIC_SHARED,
    power_of_two,
    programmatic_launch,
    run,
)
from lowbit.runtime.kernels.linear.dense_rows import multiply_rows, rows_bytes
from lowbit.runtime.kernels.ptx.memory import declaration, shared_buffer
from lowbit.runtime.kernels.ptx.mma import threads
from lowbit.runtime.kernels.rows import rms_norm_ref

FEW_TOKENS = 16  # of a launch
WARPS = 8
FEW_ROWS = 1024
CHUNK = 8  # columns that a lane loads together


def dense_gemv_ref(
    x: Tensor,
    w: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
) -> Tensor:
    """The value `dense_gemv` approximates: [B, N] float64."""
    x = x.double() if norm is None else rms_norm_ref(x, norm, eps)
    y = x @ w.double().T
    return y if added is None else y + added.double()


@gluon.jit(do_not_specialize=["B", "N", "added_stride"])
def _dense_gemv_kernel(
    x_ptr, gain_ptr, w_ptr, added_ptr, y_ptr, B, N, added_stride, eps,
    TOKENS: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr, STAGED: gl.constexpr,
    SHARED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    warp, lane, zero, none = threads(WARPS)
    multiply_rows(
        x_ptr, gain_ptr, w_ptr, added_ptr, y_ptr, shared_buffer(SHARED) + zero, warp, lane, none,
        B, N, added_stride, eps, TOKENS, K, WARPS, PDL, False, STAGED,
    )  # fmt: skip


def dense_gemv(
    x: Tensor,
    w: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`added + rms_norm(x) @ w.T` for a weight as stored, which every 16 tokens read.

    Args:
        x: [B, K] bfloat16, contiguous.
        w: [N, K] bfloat16, contiguous; K is a multiple of 8.
        norm: [K] gain of the RMS norm; None leaves x as it is.
        eps: of the norm.
        added: [B, N] or [1, N], a residual or a bias, added in FP32 before the one rounding.
        dtype: of the result; None is x's.

    Returns:
        [B, N].

    Raises:
        UnsupportedModelError: another dtype, or K that is not a multiple of 8.
    """
    N, K = w.shape
    if w.dtype != torch.bfloat16 or K % CHUNK:
        raise UnsupportedModelError(
            f"a dense linear of {N} x {K} in {w.dtype} has no GPU kernel: expected bfloat16 and "
            f"columns in multiples of {CHUNK}",
            hint="run on the CPU with --device cpu",
        )
    y = torch.empty((x.shape[0], N), dtype=dtype or x.dtype, device=x.device)
    for first in range(0, x.shape[0], FEW_TOKENS):
        part = slice(first, first + FEW_TOKENS)
        of_part = added if added is None or added.shape[0] == 1 else added[part]
        _launch(x[part], w, norm, eps, of_part, y[part])
    return y


def _launch(
    x: Tensor, w: Tensor, norm: Tensor | None, eps: float, added: Tensor | None, y: Tensor
) -> None:
    B, (N, K) = x.shape[0], w.shape
    tokens = power_of_two(B)
    pdl = programmatic_launch(x)
    needed = rows_bytes(tokens, K)
    staged = tokens == 1 and K % 256 == 0 and N <= FEW_ROWS and needed <= STATIC_SHARED
    run(
        _dense_gemv_kernel,
        (-(-N // 16),),
        x,
        norm,
        w,
        added,
        y,
        B,
        N,
        0 if added is None or added.shape[0] == 1 else N,
        eps,
        TOKENS=tokens,
        K=K,
        WARPS=WARPS,
        STAGED=staged,
        SHARED=declaration(needed if staged else rows_bytes(tokens)),
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
