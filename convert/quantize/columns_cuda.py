"""The loops of `columns` as one Triton kernel a block of columns.

Layout  every operand [B, N] with N contiguous, B = 128 columns of the linear; U and H [B, B]
Plan    a program takes BLOCK_N rows of the linear and keeps their B weights in registers; step i
        picks column i out of them, rounds it, and changes all later ones by a rank-1 update
Bytes   16 B * N a block (weights, steps, codes, errors), so a linear's [N, K] is read and written
        once; the B^2 * N multiply-adds of the updates take longer than that
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.convert.quantize.search_cuda import rounded
from lowbit.formats.layout.scheme import Scheme

BLOCK_N = 32
WARPS = 1


@triton.jit
def _compensate_kernel(
    block_ptr, steps_ptr, u_ptr, codes_ptr, errors_ptr,
    N, code_min, code_max, B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = tl.arange(0, B)
    mask = offs_n < N
    offs = offs_b[:, None].to(tl.int64) * N + offs_n[None, :]
    w = tl.load(block_ptr + offs, mask=mask[None, :], other=0.0)  # [B, BLOCK_N]
    for i in range(B):
        column = tl.sum(tl.where(offs_b[:, None] == i, w, 0.0), axis=0)  # [BLOCK_N]
        row = tl.full((1,), i, tl.int64) * N
        step = tl.load(steps_ptr + row + offs_n, mask=mask, other=1.0)
        code = rounded(tl.div_rn(column, step), code_min, code_max)
        u = tl.load(u_ptr + i * B + offs_b)  # zero before column i
        diagonal = tl.load(u_ptr + i * B + i)
        error = tl.div_rn(column - code * step, diagonal)
        tl.store(codes_ptr + row + offs_n, code, mask=mask)
        tl.store(errors_ptr + row + offs_n, error, mask=mask)
        w -= u[:, None] * error[None, :]


@triton.jit
def _polish_kernel(
    slope_ptr, codes_ptr, steps_ptr, h_ptr, new_ptr,
    N, code_min, code_max, B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = tl.arange(0, B)
    mask = offs_n < N
    offs = offs_b[:, None].to(tl.int64) * N + offs_n[None, :]
    slope = tl.load(slope_ptr + offs, mask=mask[None, :], other=0.0)  # [B, BLOCK_N]
    for i in range(B):
        here = tl.sum(tl.where(offs_b[:, None] == i, slope, 0.0), axis=0)  # [BLOCK_N]
        row = tl.full((1,), i, tl.int64) * N
        step = tl.load(steps_ptr + row + offs_n, mask=mask, other=1.0)
        old = tl.load(codes_ptr + row + offs_n, mask=mask, other=0.0)
        h = tl.load(h_ptr + i * B + offs_b)
        diagonal = tl.load(h_ptr + i * B + i)
        best = rounded(old + tl.div_rn(here, diagonal * step), code_min, code_max)
        tl.store(new_ptr + row + offs_n, best, mask=mask)
        slope -= h[:, None] * ((best - old) * step)[None, :]


def compensate(block: Tensor, steps: Tensor, U: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """As `columns.compensate`, on a GPU; B is a power of two."""
    codes, errors = torch.empty_like(block), torch.empty_like(block)
    B, N = block.shape
    U = U.contiguous()
    _compensate_kernel[(triton.cdiv(N, BLOCK_N),)](
        block, steps, U, codes, errors, N,
        float(scheme.code_min), float(scheme.code_max), B, BLOCK_N, num_warps=WARPS,
    )  # fmt: skip
    return codes, errors


def polish(slope: Tensor, codes: Tensor, steps: Tensor, H: Tensor, scheme: Scheme) -> Tensor:
    """As `columns.polish`, on a GPU; B is a power of two."""
    new = torch.empty_like(codes)
    B, N = codes.shape
    H = H.contiguous()
    _polish_kernel[(triton.cdiv(N, BLOCK_N),)](
        slope, codes, steps, H, new, N,
        float(scheme.code_min), float(scheme.code_max), B, BLOCK_N, num_warps=WARPS,
    )  # fmt: skip
    return new
