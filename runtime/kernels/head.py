"""The small ops around a head for multi-token prediction: its input, and hidden states for it.

    head_input: cat(rms_norm(table[id]) * gain_0, rms_norm(rms_norm(x) * gain_1) * gain_2)
    store_hidden: hidden_ring[row, position % T] = x

Layout  x [M, h] and table [V, h] bf16, gains [h] -> [M, 2 * h] bf16; hidden_ring [R, T, h] bf16
Bytes   some rows, from L2
Plan    a program takes a token. The values are those of `embed`, `rms_norm` and `cat` one after
        another, each rounded to bf16, in one launch instead of five
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import programmatic_launch, run
from lowbit.runtime.kernels.rows import rms_norm_ref

BLOCK = 1024


def head_input_ref(
    ids: Tensor,
    table: Tensor,
    x: Tensor,
    gains: tuple[Tensor, Tensor, Tensor],
    eps: float,
) -> Tensor:
    """The value `head_input` approximates: [M, 2 * h] float64."""
    embedding_norm, norm, hidden_norm = gains
    after = rms_norm_ref(x, norm, eps)
    parts = rms_norm_ref(table[ids], embedding_norm, eps), rms_norm_ref(after, hidden_norm, eps)
    return torch.cat(parts, dim=1)


@triton.jit
def _head_input_kernel(
    ids_ptr, table_ptr, x_ptr, embedding_norm_ptr, norm_ptr, hidden_norm_ptr, y_ptr, h, eps,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < h
    embedding_gain = tl.load(embedding_norm_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(norm_ptr + at, mask=mask, other=0.0).to(tl.float32)
    hidden_gain = tl.load(hidden_norm_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(ids_ptr + token).to(tl.int64) * h
    x = tl.load(x_ptr + token * h + at, mask=mask, other=0.0).to(tl.float32)
    embedded = tl.load(table_ptr + row + at, mask=mask, other=0.0).to(tl.float32)
    kind: tl.constexpr = y_ptr.dtype.element_ty
    after = (x * tl.rsqrt(tl.sum(x * x, axis=0) / h + eps) * gain).to(kind).to(tl.float32)
    hidden = after * tl.rsqrt(tl.sum(after * after, axis=0) / h + eps) * hidden_gain
    embedded = embedded * tl.rsqrt(tl.sum(embedded * embedded, axis=0) / h + eps) * embedding_gain
    tl.store(y_ptr + token * 2 * h + at, embedded.to(kind), mask=mask)
    tl.store(y_ptr + token * 2 * h + h + at, hidden.to(kind), mask=mask)


@triton.jit
def _store_hidden_kernel(
    x_ptr, rows_ptr, positions_ptr, ring_ptr, h, HIDDEN_RING: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + token).to(tl.int64)  # older than the kernel ahead, which has waited
    place = tl.load(positions_ptr + token) % HIDDEN_RING
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + token * h + at, mask=at < h)
    tl.store(ring_ptr + (row * HIDDEN_RING + place) * h + at, x, mask=at < h)


def head_input(
    ids: Tensor,
    table: Tensor,
    x: Tensor,
    gains: tuple[Tensor, Tensor, Tensor],
    eps: float,
) -> Tensor:
    """Input of a head's first linear; see `Ops.head_input`."""
    M, h = x.shape
    y = torch.empty((M, 2 * h), dtype=x.dtype, device=x.device)
    pdl = programmatic_launch(x)
    run(
        _head_input_kernel,
        (M,),
        ids,
        table,
        x,
        *gains,
        y,
        h,
        eps,
        BLOCK=triton.next_power_of_2(h),
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return y


def store_hidden(x: Tensor, rows: Tensor, positions: Tensor, hidden_ring: Tensor) -> None:
    """Store hidden states in the hidden rings of their rows; see `Ops.store_hidden`."""
    M, h = x.shape
    pdl = programmatic_launch(x)
    run(
        _store_hidden_kernel,
        (M, triton.cdiv(h, BLOCK)),
        x,
        rows,
        positions,
        hidden_ring,
        h,
        HIDDEN_RING=hidden_ring.shape[1],
        BLOCK=BLOCK,
        PDL=pdl,
        launch_pdl=pdl,
        enable_fp_fusion=True,  # where it is left out, Triton warns
    )
