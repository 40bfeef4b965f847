"""The small row-wise ops around the linears: embedding lookup, RMS norm and SwiGLU of M tokens.

A decode step of one token uses `embed` alone (norm and SwiGLU are fused into its GEMVs), one of
several sequences `rms_norm` too, so those take part in programmatic launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import programmatic_launch, run
from lowbit.runtime.weights.table import PackedTable, Table

BLOCK = 1024


def embed_ref(ids: Tensor, table: Table) -> Tensor:
    """The value `embed` gives: [M, h]."""
    return table[ids] if isinstance(table, Tensor) else table.rows(ids)


def rms_norm_ref(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The value `rms_norm` approximates: [M, K] float64."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.double()


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """The value `swiglu` approximates: [M, N / 2] float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@triton.jit
def _embed_kernel(ids_ptr, table_ptr, out_ptr, h, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()  # first: before its own wait attention reads positions that other GPUs give
        gdc_launch_dependents()
    row = tl.load(ids_ptr + token).to(tl.int64)
    x = tl.load(table_ptr + row * h + offs, mask=offs < h)
    tl.store(out_ptr + token * h + offs, x, mask=offs < h)


@triton.jit
def _embed_packed_kernel(
    ids_ptr, codes_ptr, scales_ptr, out_ptr, h, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """codes_ptr: bytes, a code each, 128 more than its value."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()  # first: before its own wait attention reads positions that other GPUs give
        gdc_launch_dependents()
    row = tl.load(ids_ptr + token).to(tl.int64)
    code = tl.load(codes_ptr + row * h + offs, mask=offs < h, other=128).to(tl.int32) - 128
    scale = tl.load(scales_ptr + row * (h // GROUP) + offs // GROUP, mask=offs < h, other=0.0)
    x = code.to(tl.float32) * scale.to(tl.float32)
    tl.store(out_ptr + token * h + offs, x.to(out_ptr.dtype.element_ty), mask=offs < h)


@triton.jit
def _rms_norm_kernel(
    x_ptr, gain_ptr, y_ptr, K, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * K
    offs = tl.arange(0, BLOCK)
    gain = tl.load(gain_ptr + offs, mask=offs < K, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row + offs, mask=offs < K, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * gain
    tl.store(y_ptr + row + offs, y.to(y_ptr.dtype.element_ty), mask=offs < K)


@triton.jit(do_not_specialize=["count"])
def _swiglu_kernel(gate_up_ptr, y_ptr, I, count, stride, BLOCK: tl.constexpr):  # noqa: E741
    """I: inner size of gate and up, of which count are wanted; stride: from row to row of y."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    gate = tl.load(gate_up_ptr + token * 2 * I + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * I + I + offs, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + token * stride + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def embed(ids: Tensor, table: Table) -> Tensor:
    """Rows of table [V, h] for ids [M] int64: [M, h]."""
    if isinstance(table, PackedTable):
        return _embed_packed(ids, table)
    M, h = ids.shape[0], table.shape[1]
    out = torch.empty((M, h), dtype=table.dtype, device=table.device)
    pdl = programmatic_launch(table)
    run(
        _embed_kernel,
        (M, triton.cdiv(h, BLOCK)),
        ids,
        table,
        out,
        h,
        BLOCK=BLOCK,
        PDL=pdl,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return out


def _embed_packed(ids: Tensor, table: PackedTable) -> Tensor:
    M, h = ids.shape[0], table.shape[1]
    out = torch.empty((M, h), dtype=table.dtype, device=table.device)
    pdl = programmatic_launch(table.codes)
    run(
        _embed_packed_kernel,
        (M, triton.cdiv(h, BLOCK)),
        ids,
        table.codes.view(torch.uint8),
        table.scales,
        out,
        h,
        GROUP=table.group_size,
        BLOCK=BLOCK,
        PDL=pdl,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return out


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * gain` of each row of x [M, K]: [M, K]."""
    M, K = x.shape
    y = torch.empty_like(x)
    pdl = programmatic_launch(x)
    run(
        _rms_norm_kernel,
        (M,),
        x,
        gain,
        y,
        K,
        eps,
        BLOCK=triton.next_power_of_2(K),
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return y


def swiglu(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up` of [M, N], gate first: [M, N / 2].

    Args:
        out: of the first so many columns where it has fewer; its rows may lie apart.
    """
    M, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((M, inner), dtype=gate_up.dtype, device=gate_up.device)
    run(
        _swiglu_kernel,
        (M, triton.cdiv(out.shape[1], BLOCK)),
        gate_up,
        out,
        inner,
        out.shape[1],
        out.stride(0),
        BLOCK=BLOCK,
        enable_fp_fusion=True,
    )
    return out
