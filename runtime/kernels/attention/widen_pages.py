"""widen_pages: a sequence's INT8 keys and values of a layer as BF16 pages that follow one another.

    x = bf16(code * scale)

Bytes   3 * 2 * Hkv * D a token: codes read, twice as many bytes written
Plan    Programs take pages in turn, up to the last of the sequence, which the step's tensors know
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.kernels.launch.device import card_of, run
from lowbit.runtime.state.page_counts import PAGE

EACH = 4  # programs of a multiprocessor
BLOCK = 8192  # elements at a time


@triton.jit(do_not_specialize=["table_stride"])
def _widen_pages_kernel(
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, k_out_ptr, v_out_ptr, tables_ptr, rows_ptr,
    positions_ptr, starts_ptr, table_stride,
    ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """HEADS: of keys; ROWS: of a page."""
    SIZE: tl.constexpr = ROWS * HEADS * D
    end = tl.load(positions_ptr) + tl.load(starts_ptr + 1)
    table_ptr = tables_ptr + tl.load(rows_ptr) * table_stride
    for page in range(tl.program_id(0), (end + ROWS - 1) // ROWS, tl.num_programs(0)):
        source = tl.load(table_ptr + page).to(tl.int64)
        for start in range(0, SIZE, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < SIZE
            of = source * (ROWS * HEADS) + at // D
            k = tl.load(k_ptr + source * SIZE + at, mask=inside, other=0).to(tl.float32)
            v = tl.load(v_ptr + source * SIZE + at, mask=inside, other=0).to(tl.float32)
            k *= tl.load(k_scales_ptr + of, mask=inside, other=0.0).to(tl.float32)
            v *= tl.load(v_scales_ptr + of, mask=inside, other=0.0).to(tl.float32)
            to = tl.cast(page, tl.int64) * SIZE + at
            tl.store(k_out_ptr + to, k.to(k_out_ptr.dtype.element_ty), mask=inside)
            tl.store(v_out_ptr + to, v.to(v_out_ptr.dtype.element_ty), mask=inside)


def widen_pages(
    stored: tuple[Tensor, Tensor, Tensor, Tensor], where: tuple[Tensor | int, ...], pages: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence in BF16.

    Args:
        stored: codes of keys and values [P, PAGE, Hkv, D] int8, their scales [P, PAGE, Hkv].
        where: the step's block tables, rows, positions, starts, and the tables' row stride.
        pages: that a sequence may have.

    Returns:
        [pages, PAGE, Hkv, D] bfloat16 each; anything behind the sequence's last page.
    """
    rows, heads, D = stored[0].shape[1:]
    k, v = stored[0].new_empty((2, pages, rows, heads, D), dtype=torch.bfloat16)
    run(
        _widen_pages_kernel,
        (EACH * card_of(stored[0]).multiprocessors,),
        *stored,
        k,
        v,
        *where,
        ROWS=PAGE,
        HEADS=heads,
        D=D,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return k, v
