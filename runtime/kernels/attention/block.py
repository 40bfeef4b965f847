"""attend_block: attention of blocks of drafts to the context before them and to themselves.

    q, k  = rope(rms_norm(q) * q_norm), rope(rms_norm(k) * k_norm)      (per head, FP32)
    out_h = softmax(q_h . k / sqrt(D)) @ v      over the positions that a token of the layer sees

Layout  qkv [M, (Hq + 2 * Hkv) * D] bf16, blocks of `longest` tokens side by side; context in pages
        [P, PAGE, Hkv, D] bf16, or int8 with scales [P, PAGE, Hkv] bf16; out [M, Hq * D] bf16
Bytes   4 * Hkv * D * T of context a sequence and layer; T = 8192, 8 heads of 128: 33.6 MB
Plan    `_rotate_block` leaves queries and keys of the blocks aside, which are not kept. A program
        takes the query heads of a kv head, of up to 64 rows (token, head) of a block, over a split
        of its context, in order; split 0 also takes the block's own keys. `_join_block` joins the
        splits. `write_context` norms, rotates and stores keys and values by each token's position.
        Drafts are only guesses: bits may depend on what else is in the step
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.formats.page_counts import PAGE
from lowbit.runtime.kernels.attention.heads import Heads, heads_of
from lowbit.runtime.kernels.attention.prefill import BLOCK_H, append_codes, rotated_heads
from lowbit.runtime.kernels.launch.attention import block_launch
from lowbit.runtime.kernels.launch.device import programmatic_launch, run
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import AttentionLayer, ContextLayers

LOG2E = math.log2(math.e)
UNSEEN = tl.constexpr(-1e30)  # score of what a token does not see: finite, so that none is NaN


@triton.jit(do_not_specialize=["table_stride", "pages"])
def _write_context_kernel(
    kv_ptr, k_norms_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, tables_ptr,
    rows_ptr, positions_ptr, angles_ptr, table_stride, pages, eps,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_H heads of k or of v of a token and layer.

    pages: of a layer; ROWS: of a page; k_ptr and the like point to the first layer.
    """
    D: tl.constexpr = HEADS.dim
    Hkv: tl.constexpr = HEADS.kv
    BLOCKS: tl.constexpr = (Hkv + BLOCK_H - 1) // BLOCK_H
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token, layer = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    block = tl.program_id(1)
    x_ptr = kv_ptr + (token * tl.num_programs(2) + layer) * (2 * Hkv * D)
    position = tl.load(positions_ptr + token)
    table_ptr = tables_ptr + tl.load(rows_ptr + token) * table_stride
    page = tl.load(table_ptr + position // ROWS).to(tl.int64) + layer * pages
    stored = (page * ROWS + position % ROWS) * Hkv  # heads before this token
    head = block % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = head < Hkv
    at = (stored + head)[:, None] * D + tl.arange(0, D)[None, :]
    if block < BLOCKS:
        turn = tl.load(angles_ptr + token)
        k = rotated_heads(
            x_ptr, k_norms_ptr + layer * D, cos_ptr, sin_ptr, head * D, inside, turn, eps, HEADS
        )  # fmt: skip
        if k_scales_ptr is None:
            tl.store(k_ptr + at, k.to(k_ptr.dtype.element_ty), mask=inside[:, None])
        else:
            append_codes(k, k_ptr, k_scales_ptr, stored + head, inside, D)
    else:
        start = (Hkv + head) * D
        v_at = start[:, None] + tl.arange(0, D)[None, :]
        v = tl.load(x_ptr + v_at, mask=inside[:, None], other=0.0)
        if v_scales_ptr is None:
            tl.store(v_ptr + at, v, mask=inside[:, None])
        else:
            append_codes(v.to(tl.float32), v_ptr, v_scales_ptr, stored + head, inside, D)


@triton.jit
def _rotate_block_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, angles_ptr, eps,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_H heads of q or of k of a token."""
    D: tl.constexpr = HEADS.dim
    Hkv: tl.constexpr = HEADS.kv
    Hq: tl.constexpr = HEADS.kv * HEADS.shared
    Q_BLOCKS: tl.constexpr = (Hq + BLOCK_H - 1) // BLOCK_H
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    turn = tl.load(angles_ptr + token)
    offs_d, offs_h = tl.arange(0, D), tl.arange(0, BLOCK_H)
    x_ptr = qkv_ptr + token * ((Hq + 2 * Hkv) * D)
    if block < Q_BLOCKS:
        head = block * BLOCK_H + offs_h
        q = rotated_heads(
            x_ptr, q_norm_ptr, cos_ptr, sin_ptr, head * D, head < Hq, turn, eps, HEADS
        )  # fmt: skip
        out = q_out_ptr + (token * Hq + head)[:, None] * D + offs_d[None, :]
        tl.store(out, q.to(q_out_ptr.dtype.element_ty), mask=(head < Hq)[:, None])
    else:
        head = (block - Q_BLOCKS) * BLOCK_H + offs_h
        start = (Hq + head) * D
        k = rotated_heads(
            x_ptr, k_norm_ptr, cos_ptr, sin_ptr, start, head < Hkv, turn, eps, HEADS
        )  # fmt: skip
        out = k_out_ptr + (token * Hkv + head)[:, None] * D + offs_d[None, :]
        tl.store(out, k.to(k_out_ptr.dtype.element_ty), mask=(head < Hkv)[:, None])


@triton.jit
def _with_keys(q, top, total, acc, k, v, scale, share, seen, WIDE: tl.constexpr):
    """The softmax's state with a block of keys more.

    scale [1 or keys]: of scores; share [keys]: of values, None where they have no scales; seen
    [rows, keys]: what a row's token sees.
    """
    if WIDE:
        scores = tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32)) * scale
    else:
        scores = tl.dot(q, tl.trans(k.to(q.dtype))) * scale
    scores = tl.where(seen, scores, UNSEEN)
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.where(seen, tl.exp2(scores - new_top[:, None]), 0.0)
    kept = tl.exp2(top - new_top)
    total = total * kept + tl.sum(weights, axis=1)
    acc *= kept[:, None]
    if share is not None:
        weights *= share[None, :]
    if WIDE:
        acc += tl.dot(weights, v.to(tl.float32))
    else:
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc)
    return new_top, total, acc


@triton.jit(do_not_specialize=["table_stride"])
def _attend_block_kernel(
    q_ptr, k_own_ptr, qkv_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, sums_ptr,
    state_ptr, tables_ptr, rows_ptr, positions_ptr, table_stride, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program takes rows of a kv head, of one block, over one of all splits of its context.

    scale: of scores, times log2(e); SIZE: tokens of a block; WINDOW: positions that a token sees,
    0 for all; ROWS: of a page; WIDE: products in FP32 (interpreter). out_ptr is None where there
    are several splits, sums_ptr and state_ptr where there is one.
    """
    D: tl.constexpr = HEADS.dim
    Hkv: tl.constexpr = HEADS.kv
    SHARED: tl.constexpr = HEADS.shared
    Hq: tl.constexpr = Hkv * SHARED
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kv, part = tl.program_id(0) % Hkv, tl.program_id(0) // Hkv
    split, splits = tl.program_id(1), tl.num_programs(1)
    block = tl.program_id(2).to(tl.int64) * SIZE  # its first token
    first = tl.load(positions_ptr + block)
    table_ptr = tables_ptr + tl.load(rows_ptr + block) * table_stride
    row = part * BLOCK_M + tl.arange(0, BLOCK_M)
    place = row // SHARED  # of the row's token in the block
    offs_d, offs_n = tl.arange(0, D), tl.arange(0, BLOCK_N)
    inside = place < SIZE
    line = (block + place) * Hq + kv * SHARED + row % SHARED  # of q and out
    q = tl.load(q_ptr + line[:, None] * D + offs_d[None, :], mask=inside[:, None], other=0.0)
    top = tl.full([BLOCK_M], UNSEEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    start = first * 0
    if WINDOW > 0:
        start = tl.maximum(first + part * BLOCK_M // SHARED - WINDOW + 1, 0)
    each = tl.cdiv(tl.cdiv(tl.maximum(first - start, 0), splits), BLOCK_N) * BLOCK_N
    start += split * each
    end = tl.minimum(start + each, first)
    for at in range(start, end, BLOCK_N):
        keys = at + offs_n
        there = keys < end
        page = tl.load(table_ptr + tl.minimum(keys, end - 1) // ROWS).to(tl.int64)
        stored = (page * ROWS + keys % ROWS) * Hkv + kv
        where = stored[:, None] * D + offs_d[None, :]
        k = tl.load(k_ptr + where, mask=there[:, None], other=0.0)
        v = tl.load(v_ptr + where, mask=there[:, None], other=0.0)
        of_keys = scale
        share = None
        if k_scales_ptr is not None:
            of_keys = tl.load(k_scales_ptr + stored, mask=there, other=0.0).to(tl.float32) * scale
            of_keys = of_keys[None, :]
            share = tl.load(v_scales_ptr + stored, mask=there, other=0.0).to(tl.float32)
        seen = (place[:, None] < SIZE) & there[None, :]
        if WINDOW > 0:
            seen = seen & (first + place[:, None] - keys[None, :] < WINDOW)
        top, total, acc = _with_keys(q, top, total, acc, k, v, of_keys, share, seen, WIDE)
    if split == 0:
        for at in range(0, SIZE, BLOCK_N):
            keys = at + offs_n
            there = keys < SIZE
            own = (block + keys) * Hkv + kv
            k = tl.load(
                k_own_ptr + own[:, None] * D + offs_d[None, :], mask=there[:, None], other=0.0
            )
            v_at = (block + keys) * (Hq + 2 * Hkv) + Hq + Hkv + kv
            v = tl.load(
                qkv_ptr + v_at[:, None] * D + offs_d[None, :], mask=there[:, None], other=0.0
            )
            seen = (place[:, None] < SIZE) & there[None, :]
            ahead = keys[None, :] - place[:, None]
            if CAUSAL:
                seen = seen & (ahead <= 0)
            if WINDOW > 0:
                seen = seen & (ahead < WINDOW) & (-ahead < WINDOW)
            top, total, acc = _with_keys(q, top, total, acc, k, v, scale, None, seen, WIDE)
    if out_ptr is not None:
        out = acc / tl.where(inside, total, 1.0)[:, None]
        to = out_ptr + line[:, None] * D + offs_d[None, :]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        to = line * splits + split
        tl.store(sums_ptr + to[:, None] * D + offs_d[None, :], acc, mask=inside[:, None])
        tl.store(state_ptr + 2 * to, top, mask=inside)
        tl.store(state_ptr + 2 * to + 1, total, mask=inside)


@triton.jit
def _join_block_kernel(
    sums_ptr, state_ptr, out_ptr, D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A program joins the splits of a query head of a token."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(0).to(tl.int64)
    split, offs_d = line * SPLITS + tl.arange(0, SPLITS), tl.arange(0, D)
    top, total = tl.load(state_ptr + 2 * split), tl.load(state_ptr + 2 * split + 1)
    weights = tl.exp2(top - tl.max(top, axis=0))
    sums = tl.load(sums_ptr + split[:, None] * D + offs_d[None, :])
    out = tl.sum(weights[:, None] * sums, axis=0) / tl.sum(weights * total, axis=0)
    tl.store(out_ptr + line * D + offs_d, out.to(out_ptr.dtype.element_ty))


def write_context(kv: Tensor, layers: ContextLayers, pages: KVPages, step: Step) -> None:
    """Norm and rotate k, write k and v to pages; see `DraftOps.write_context`.

    Padding goes where its rows and positions point to, the scratch page.
    """
    Hkv, D, pdl = pages.heads, pages.head_dim, programmatic_launch(kv)
    heads = Heads(Hkv, 1, D, 2 * layers.rope.cos.shape[1], gated=False)
    run(
        _write_context_kernel,
        (kv.shape[0], 2 * triton.cdiv(Hkv, BLOCK_H), len(layers.k_norms)),
        *(kv, layers.k_norms, layers.rope.cos, layers.rope.sin, *_stored(layers.first, pages)),
        *(step.tables, step.rows, step.positions, step.angles),
        *(step.tables.shape[1], pages.count, layers.eps),
        HEADS=heads,
        BLOCK_H=BLOCK_H,
        ROWS=PAGE,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )


def attend_block(qkv: Tensor, layer: AttentionLayer, pages: KVPages, step: Step) -> Tensor:
    """Attend to what stands before each block and to the block; see `DraftOps.attend_block`.

    Returns:
        [M, Hq * D] in the dtype of qkv.
    """
    M, size, heads = qkv.shape[0], step.longest, heads_of(qkv, layer, pages)
    D, reach = heads.dim, min(step.max_kv_len, layer.window or step.max_kv_len)
    launch = block_launch(size * heads.shared, heads.kv * (M // size), D, reach)
    pdl = programmatic_launch(qkv)
    q, k = (qkv.new_empty((M, count * D)) for count in (heads.queries, heads.kv))
    run(
        _rotate_block_kernel,
        (M, triton.cdiv(heads.queries, BLOCK_H) + triton.cdiv(heads.kv, BLOCK_H)),
        *(qkv, layer.q_norm, layer.k_norm, layer.rope.cos, layer.rope.sin, q, k),
        *(step.angles, layer.eps),
        HEADS=heads,
        BLOCK_H=BLOCK_H,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    out, sums, state = torch.empty_like(q), None, None
    if launch.splits > 1:
        lines = M * heads.queries * launch.splits
        sums = q.new_empty((lines, D), dtype=torch.float32)
        state = q.new_empty((lines, 2), dtype=torch.float32)
    run(
        _attend_block_kernel,
        (heads.kv * triton.cdiv(size * heads.shared, launch.rows), launch.splits, M // size),
        *(q, k, qkv, *_stored(layer.index, pages), out if sums is None else None, sums, state),
        *(step.tables, step.rows, step.positions, step.tables.shape[1], D**-0.5 * LOG2E),
        HEADS=heads,
        SIZE=size,
        WINDOW=layer.window or 0,
        CAUSAL=layer.causal,
        BLOCK_M=launch.rows,
        BLOCK_N=launch.keys,
        ROWS=PAGE,
        WIDE=q.device.type == "cpu",
        PDL=pdl,
        num_warps=launch.warps,
        num_stages=2,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    if sums is not None:
        run(
            _join_block_kernel,
            (M * heads.queries,),
            *(sums, state, out),
            D=D,
            SPLITS=launch.splits,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
            enable_fp_fusion=True,
        )
    return out


def _stored(layer: int, pages: KVPages) -> tuple[Tensor | None, ...]:
    return (*pages.layer(layer), *(pages.layer_scales(layer) or (None, None)))
