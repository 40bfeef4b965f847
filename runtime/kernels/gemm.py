"""gemm: y[m, n] = sum_k x[m, k] * scale[n, k // G] * code[n, k]   (several tokens, fp32 acc).

Layout  x [M, K] bf16, codes [N, K * bits / 32] int32 (formats.packing), scales [N, K/G] float
Fused   residual + y before the one rounding
Plan    a tensor-core tile of BLOCK_M tokens by BLOCK_N rows; codes are exact in BF16 and one block
        of K lies inside one group, so the scale multiplies the FP32 partial sum: nothing is rounded
        but the result
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.kernels.device import on_gpu
from lowbit.runtime.kernels.launch import gemm_launch
from lowbit.runtime.linear import PackedLinear


def gemm_ref(x: Tensor, w: PackedLinear, residual: Tensor | None = None) -> Tensor:
    """The value `gemm` approximates: [M, N] float64 on the exact stored codes."""
    y = x.double() @ w.dequantized().double().T
    return y if residual is None else y + residual.double()


@triton.jit(do_not_specialize=["M"])  # else multiples of 16 tokens compile apart from others
def _gemm_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    residual_ptr,
    y_ptr,
    M,
    N,
    residual_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):
    CODES: tl.constexpr = 32 // BITS
    ZERO: tl.constexpr = 2.0**23 + 2 ** (BITS - 1)  # 0x4B000000 is 2^23; a code below adds exactly
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.minimum(offs_m, M - 1).to(tl.int64)  # past the end: the last one again, not stored
    rows = tl.minimum(offs_n, N - 1).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    offs_w = tl.arange(0, BLOCK_K // CODES)
    shifts = tl.arange(0, CODES) * BITS
    operand = tl.bfloat16 if NATIVE else tl.float32  # the interpreter's dot takes FP32 only
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        x = tl.load(x_ptr + tokens[:, None] * K + k + offs_k[None, :])
        words = tl.load(codes_ptr + rows[:, None] * (K // CODES) + k // CODES + offs_w[None, :])
        scale = tl.load(scales_ptr + rows * (K // G) + k // G).to(tl.float32)  # [BLOCK_N]
        codes = (words[:, :, None] >> shifts[None, None, :]) & (2**BITS - 1)
        codes = (codes | 0x4B000000).to(tl.float32, bitcast=True) - ZERO
        codes = tl.reshape(codes.to(operand), [BLOCK_N, BLOCK_K])
        acc += tl.dot(x.to(operand), tl.trans(codes)) * scale[None, :]
    out = tokens[:, None] * N + rows[None, :]
    if residual_ptr is not None:
        residual = tokens[:, None] * residual_stride + rows[None, :]
        acc += tl.load(residual_ptr + residual).to(tl.float32)
    stored = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(y_ptr + out, acc.to(y_ptr.dtype.element_ty), mask=stored)


def gemm(
    x: Tensor, w: PackedLinear, residual: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """`residual + x @ w.T`.

    Args:
        x: [M, K] bfloat16, contiguous.
        w: [N, K].
        residual: [M, N], added in FP32 before the one rounding; rows may share memory, as those of
            an expanded bias do.
        dtype: of the result; None is x's.

    Returns:
        [M, N].
    """
    M = x.shape[0]
    y = torch.empty((M, w.N), dtype=dtype or x.dtype, device=x.device)
    launch = gemm_launch(M, w.group_size)
    # Programs that share rows of the weight run side by side and find them in L2.
    grid = (triton.cdiv(M, launch.block_m), triton.cdiv(w.N, launch.block_n))
    _gemm_kernel[grid](
        x,
        w.codes,
        w.scales,
        residual,
        y,
        M,
        w.N,
        0 if residual is None else residual.stride(0),
        K=w.K,
        G=w.group_size,
        BITS=w.bits,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        NATIVE=on_gpu(x),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=True,
    )
    return y
