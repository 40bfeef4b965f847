"""gemv: y[n] = sum_k scale[n, k // G] * code[n, k] * x[k]     (one token, fp32 accumulate).

Layout  codes [N, K * bits / 32] int32 (formats.packing), scales [N, K/G] float, x [1, K] bf16
Fused   RMS norm of x: x * gain goes into the sum and rsqrt(mean(x^2) + eps) multiplies the result;
        residual + y; silu(gate) * up for gate rows n and up rows n + N/2 of one matrix
Bytes   N*K*bits/8 + 2*N*K/G; INT4, N = K = 4096, G = 128: 8.65 MB = 1.9 us at 4.56 TB/s
Plan    one program per BLOCK_N rows; every code is read once; no atomics, so bit-reproducible
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.kernels.device import on_gpu, programmatic_launch
from lowbit.runtime.kernels.dot import dot_rows
from lowbit.runtime.kernels.launch import gemv_launch
from lowbit.runtime.linear import PackedLinear


def gemv_ref(
    x: Tensor,
    w: PackedLinear,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """The value `gemv` approximates: [1, N] float64 on the exact stored codes."""
    y = normed_ref(x, norm, eps) @ w.dequantized().double().T
    return y if residual is None else y + residual.double()


def gemv_swiglu_ref(x: Tensor, norm: Tensor, eps: float, gate_up: PackedLinear) -> Tensor:
    """The value `gemv_swiglu` approximates: [1, N / 2] float64."""
    gate, up = gemv_ref(x, gate_up, norm=norm, eps=eps).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def normed_ref(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """RMS norm of the rows of x with a gain, in float64; x itself without a gain."""
    x = x.double()
    if norm is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.double()


@triton.jit
def _dot(
    x_ptr,
    gain_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    eps,
    K: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of the weight times x, normed where there is a gain: [BLOCK_N] float32."""
    y, squares = dot_rows(
        x_ptr, gain_ptr, codes_ptr, scales_ptr, rows, K, G, BITS, BLOCK_Q, NATIVE, PDL
    )
    if gain_ptr is not None:
        y *= tl.rsqrt(squares / K + eps)
    return y


@triton.jit
def _gemv_kernel(
    x_ptr,
    gain_ptr,
    codes_ptr,
    scales_ptr,
    residual_ptr,
    y_ptr,
    N,
    eps,
    K: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(offs_n, N - 1)  # past the end: the last row again, not stored
    y = _dot(x_ptr, gain_ptr, codes_ptr, scales_ptr, rows, eps, K, G, BITS, BLOCK_Q, NATIVE, PDL)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + rows).to(tl.float32)
    tl.store(y_ptr + offs_n, y.to(y_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _gemv_swiglu_kernel(
    x_ptr,
    gain_ptr,
    codes_ptr,
    scales_ptr,
    y_ptr,
    N,
    eps,
    K: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK_N)  # even: a gate row; odd: its up row
    outputs = tl.program_id(0) * (BLOCK_N // 2) + lanes // 2
    rows = tl.minimum(outputs, N // 2 - 1) + (lanes % 2) * (N // 2)
    y = _dot(x_ptr, gain_ptr, codes_ptr, scales_ptr, rows, eps, K, G, BITS, BLOCK_Q, NATIVE, PDL)
    gate, up = tl.split(tl.reshape(y, [BLOCK_N // 2, 2]))
    offs_n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + offs_n, y.to(y_ptr.dtype.element_ty), mask=offs_n < N // 2)


def gemv(
    x: Tensor,
    w: PackedLinear,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`residual + rms_norm(x) @ w.T` for one token.

    Args:
        x: [1, K] bfloat16.
        w: [N, K].
        norm: [K] gain of the RMS norm; None leaves x as it is.
        eps: of the norm.
        residual: [1, N], added in FP32 before the one rounding.
        dtype: of the result; None is x's.

    Returns:
        [1, N].
    """
    y = torch.empty((1, w.N), dtype=dtype or x.dtype, device=x.device)
    launch = gemv_launch(w.bits, w.N, w.K)
    pdl = programmatic_launch(x)
    _gemv_kernel[(triton.cdiv(w.N, launch.block_n),)](
        x,
        norm,
        w.codes,
        w.scales,
        residual,
        y,
        w.N,
        eps,
        K=w.K,
        G=w.group_size,
        BITS=w.bits,
        BLOCK_N=launch.block_n,
        BLOCK_Q=launch.block_q,
        NATIVE=on_gpu(x),
        PDL=pdl,
        num_warps=launch.num_warps,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return y


def gemv_swiglu(x: Tensor, norm: Tensor, eps: float, gate_up: PackedLinear) -> Tensor:
    """`silu(gate) * up` of the RMS-normed x for one token.

    Args:
        x: [1, K] bfloat16.
        norm: [K] gain.
        eps: of the norm.
        gate_up: [N, K]; gate is the first N / 2 rows.

    Returns:
        [1, N / 2].
    """
    y = torch.empty((1, gate_up.N // 2), dtype=x.dtype, device=x.device)
    launch = gemv_launch(gate_up.bits, gate_up.N, gate_up.K)
    pdl = programmatic_launch(x)
    _gemv_swiglu_kernel[(triton.cdiv(gate_up.N, launch.block_n),)](
        x,
        norm,
        gate_up.codes,
        gate_up.scales,
        y,
        gate_up.N,
        eps,
        K=gate_up.K,
        G=gate_up.group_size,
        BITS=gate_up.bits,
        BLOCK_N=launch.block_n,
        BLOCK_Q=launch.block_q,
        NATIVE=on_gpu(x),
        PDL=pdl,
        num_warps=launch.num_warps,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return y
