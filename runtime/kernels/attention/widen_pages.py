"""widen_pages: sequences' INT8 keys and values of a layer as BF16 pages that follow one another.

    x = bf16(code * scale)

Bytes   3 * 2 * Hkv * D a token: codes read, twice as many bytes written
Plan    Programs take pages in turn, up to the last of each sequence, which the step's tensors know
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.page_counts import PAGE
from lowbit.runtime.kernels.attention.packed import pages_up_to
from lowbit.runtime.kernels.launch.attention import Packed
from lowbit.runtime.kernels.launch.device import card_of, run

EACH = 4  # programs of a multiprocessor
BLOCK = 8192  # elements at a time


@triton.jit(do_not_specialize=["table_stride"])
def _widen_pages_kernel(
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, k_out_ptr, v_out_ptr, tables_ptr, rows_ptr,
    positions_ptr, starts_ptr, table_stride,
    PACKED: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """PACKED: see `Packed`; HEADS: of keys; ROWS: of a page."""
    SIZE: tl.constexpr = ROWS * HEADS * D
    programs = tl.num_programs(0)
    begin = 0
    before = 0  # pages of the sequences before
    first = tl.program_id(0)  # page of the sequence that falls to this program
    for sequence in range(PACKED.sequences):
        stop = tl.load(starts_ptr + sequence + 1)
        pages = pages_up_to(begin, stop - begin, positions_ptr, PACKED, ROWS)
        row = tl.load(rows_ptr + begin, mask=pages > 0, other=0)
        table_ptr = tables_ptr + row * table_stride
        for page in range(first, pages, programs):
            source = tl.load(table_ptr + page).to(tl.int64)
            for start in range(0, SIZE, BLOCK):
                at = start + tl.arange(0, BLOCK)
                inside = at < SIZE
                of = source * (ROWS * HEADS) + at // D
                k = tl.load(k_ptr + source * SIZE + at, mask=inside, other=0).to(tl.float32)
                v = tl.load(v_ptr + source * SIZE + at, mask=inside, other=0).to(tl.float32)
                k *= tl.load(k_scales_ptr + of, mask=inside, other=0.0).to(tl.float32)
                v *= tl.load(v_scales_ptr + of, mask=inside, other=0.0).to(tl.float32)
                to = tl.cast(before + page, tl.int64) * SIZE + at
                tl.store(k_out_ptr + to, k.to(k_out_ptr.dtype.element_ty), mask=inside)
                tl.store(v_out_ptr + to, v.to(v_out_ptr.dtype.element_ty), mask=inside)
        begin = stop
        before += pages
        first = (first + programs - pages % programs) % programs


def widen_pages(
    stored: tuple[Tensor, Tensor, Tensor, Tensor],
    where: tuple[Tensor | int, ...],
    pages: int,
    packed: Packed,
) -> tuple[Tensor, Tensor]:
    """Keys and values in BF16 of the sequences that are taken, one behind another.

    Args:
        stored: codes of keys and values [P, PAGE, Hkv, D] int8, their scales [P, PAGE, Hkv].
        where: the step's block tables, rows, positions, starts, and the tables' row stride.
        pages: that these sequences may have together; more would be written behind the result.
        packed: the sequences.

    Returns:
        [pages, PAGE, Hkv, D] bfloat16 each; anything behind the last sequence's last page.
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
        PACKED=packed,
        ROWS=PAGE,
        HEADS=heads,
        D=D,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return k, v
