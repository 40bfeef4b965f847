"""attention_prefill: q/k norm, rotation and append of a prompt's M tokens, then causal attention.

    q, k = rope(rms_norm(q) * q_norm), rope(rms_norm(k) * k_norm)       (per head, FP32)
    out  = softmax(q . k^T / sqrt(D) + causal) @ v over the sequence's rows up to its end
    out *= sigmoid(gate)                                                (where gated)

Layout  qkv [M, (Hq + 2 * Hkv) * D] bf16, each q head followed by its gate where gated; pages k, v
        [P, PAGE, Hkv, D] bf16, or int8 with scales [P, PAGE, Hkv] bf16; a token takes the row of
        its position. Positions, sequences and numbers of tokens are read from the step's tensors;
        tokens past the last sequence are padding: nothing is stored
Bytes   many tokens whose pages do not follow one another: 16 * Hkv * D * (length + M) to gather
Plan    A Triton program per token and 8 heads writes q aside and k, v into the pages. Attention of
        few tokens is a kernel whose programs take some tokens of a head over all keys, in order,
        their softmax as they go; the last keys, which not all of these tokens see, in a loop of
        their own. Codes become BF16 in it, exactly; the scales of keys are multiplied into scores,
        those of values into weights. Many tokens are for `prefill_hopper`, elsewhere for PyTorch's
        flash attention, over the pages as they lie where they follow one another, else over rows
        gathered from them; of codes both get rows in BF16. Where pages lie changes no bit. Of
        several sequences in a chunk each takes the kernel that it takes alone (`prompt_ways`)
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

from lowbit.formats.page_counts import PAGE, pages_for
from lowbit.runtime.kernels.attention.heads import Heads, heads_of
from lowbit.runtime.kernels.attention.packed import sequence_of
from lowbit.runtime.kernels.attention.prefill_hopper import attend_on_hopper, prompt_plan
from lowbit.runtime.kernels.attention.widen_pages import widen_pages
from lowbit.runtime.kernels.launch.attention import Packed, prompt_launch, prompt_ways
from lowbit.runtime.kernels.launch.device import card_of, run
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.step import Span, Step
from lowbit.runtime.weights.layers import AttentionLayer

LOG2E = math.log2(math.e)
BLOCK_H = 8  # heads of a program that rotates
# Keys and values of a layer in pages, and the scales of codes
Stored = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@triton.jit
def rotated_heads(
    x_ptr, gain_ptr, cos_ptr, sin_ptr, starts, inside, turn, eps, HEADS: tl.constexpr
):  # fmt: skip
    """Heads of one token, normed and rotated: [BLOCK_H, D] float32.

    n = x * rsqrt(mean(x^2) + eps) * gain                                (x itself without a gain)
    out[d] = n[d] * cos - n[d + R/2] * sin,  out[d + R/2] = n[d + R/2] * cos + n[d] * sin
    for d < R/2, R the rotated elements; the other D - R of n pass through.

    starts [BLOCK_H] is each head's first element, turn the row of the rotary tables.
    """
    D: tl.constexpr = HEADS.dim
    R: tl.constexpr = HEADS.rotated
    offs_d = tl.arange(0, D)
    turns = offs_d < R
    partner = tl.where(turns, (offs_d + R // 2) % R, offs_d)
    angle = turn * (R // 2) + offs_d % (R // 2)
    cos = tl.where(turns, tl.load(cos_ptr + angle), 1.0)
    sin = tl.load(sin_ptr + angle) * tl.where(offs_d < R // 2, -1.0, tl.where(turns, 1.0, 0.0))
    mask = inside[:, None]
    x = tl.load(x_ptr + starts[:, None] + offs_d[None, :], mask=mask, other=0.0)
    y = tl.load(x_ptr + starts[:, None] + partner[None, :], mask=mask, other=0.0)
    x, y = x.to(tl.float32), y.to(tl.float32)
    if gain_ptr is not None:
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x *= factor * tl.load(gain_ptr + offs_d).to(tl.float32)[None, :]
        y *= factor * tl.load(gain_ptr + partner).to(tl.float32)[None, :]
    return x * cos[None, :] + y * sin[None, :]


@triton.jit
def append_codes(x, codes_ptr, scales_ptr, heads, inside, D: tl.constexpr):
    """Store heads x [BLOCK_H, D] float32 as INT8 codes and scales; see `formats.kv_cache`.

    heads [BLOCK_H]: where they go, among all heads of the pages.
    """
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # NaN is the largest
    most = bits.to(tl.float32, bitcast=True)
    scale = (tl.math.div_rn(most, 127.0).to(tl.int32, bitcast=True) + 0xFFFF) >> 16 << 16
    scale = tl.where(bits > 0x7F800000, most, scale.to(tl.float32, bitcast=True))
    quantized = (bits > 0) & (bits < 0x7F800000)
    ratio = tl.math.div_rn(x, tl.where(quantized, scale, 1.0)[:, None] + tl.zeros_like(x))
    ratio = tl.where(quantized[:, None], ratio, 0.0)
    codes = (ratio + 12582912.0) - 12582912.0  # the nearest integer, halves to even
    at = heads[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(codes_ptr + at, codes.to(tl.int8), mask=inside[:, None])
    tl.store(scales_ptr + heads, scale.to(scales_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_stride"])  # or it compiles again
def _rotate_append_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, k_scales_ptr,
    v_scales_ptr, tables_ptr, rows_ptr, positions_ptr, starts_ptr, table_stride, angles_ptr, eps,
    SEQUENCES: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_H heads of q, or of k, or of v. HEADS: see `Heads`; ROWS: of a page."""
    D: tl.constexpr = HEADS.dim
    Hkv: tl.constexpr = HEADS.kv
    Hq: tl.constexpr = HEADS.kv * HEADS.shared
    QUERY: tl.constexpr = 2 * D if HEADS.gated else D  # from one query to the next
    Q_BLOCKS: tl.constexpr = (Hq + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (Hkv + BLOCK_H - 1) // BLOCK_H
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if token >= tl.load(starts_ptr + SEQUENCES):  # padding
        return
    offs_d, offs_h = tl.arange(0, D), tl.arange(0, BLOCK_H)
    x_ptr = qkv_ptr + token * (Hq * QUERY + 2 * Hkv * D)
    row, turn = tl.load(positions_ptr + token), tl.load(angles_ptr + token)
    table_ptr = tables_ptr + tl.load(rows_ptr + token) * table_stride
    page = tl.load(table_ptr + row // ROWS).to(tl.int64)
    stored = (page * ROWS + row % ROWS) * Hkv  # heads of k or v before this row
    if block < Q_BLOCKS:
        head = block * BLOCK_H + offs_h
        q = rotated_heads(
            x_ptr, q_norm_ptr, cos_ptr, sin_ptr, head * QUERY, head < Hq, turn, eps, HEADS
        )
        out = q_ptr + (token * Hq + head)[:, None] * D + offs_d[None, :]
        tl.store(out, q.to(q_ptr.dtype.element_ty), mask=(head < Hq)[:, None])
    elif block < Q_BLOCKS + KV_BLOCKS:
        head = (block - Q_BLOCKS) * BLOCK_H + offs_h
        start = Hq * QUERY + head * D
        k = rotated_heads(x_ptr, k_norm_ptr, cos_ptr, sin_ptr, start, head < Hkv, turn, eps, HEADS)
        if k_scales_ptr is None:
            out = k_ptr + (stored + head)[:, None] * D + offs_d[None, :]
            tl.store(out, k.to(k_ptr.dtype.element_ty), mask=(head < Hkv)[:, None])
        else:
            append_codes(k, k_ptr, k_scales_ptr, stored + head, head < Hkv, D)
    else:
        head = (block - Q_BLOCKS - KV_BLOCKS) * BLOCK_H + offs_h
        inside = (head < Hkv)[:, None]
        start = Hq * QUERY + (Hkv + head) * D
        v = tl.load(x_ptr + start[:, None] + offs_d[None, :], mask=inside, other=0.0)
        if v_scales_ptr is None:
            tl.store(v_ptr + (stored + head)[:, None] * D + offs_d[None, :], v, mask=inside)
        else:
            x = v.to(tl.float32)
            append_codes(x, v_ptr, v_scales_ptr, stored + head, head < Hkv, D)


@triton.jit
def _attended(
    q, top, total, acc, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, keys, length, tokens,
    head, end, scale,
    HEADS: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The softmax's state with a block of keys more. MASKED: some are after tokens or past end."""
    D: tl.constexpr = HEADS.dim
    page = tl.load(table_ptr + tl.minimum(keys, end - 1) // ROWS).to(tl.int64)
    stored = (page * ROWS + keys % ROWS) * HEADS.kv + head // HEADS.shared
    at = stored[:, None] * D + tl.arange(0, D)[None, :]
    if MASKED:
        inside = keys[:, None] < end
        k = tl.load(k_ptr + at, mask=inside, other=0.0)
        v = tl.load(v_ptr + at, mask=inside, other=0.0)
    else:
        k = tl.load(k_ptr + at)
        v = tl.load(v_ptr + at)
    if k_scales_ptr is not None:  # codes
        if not WIDE:
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        if MASKED:
            scale *= tl.load(k_scales_ptr + stored, mask=keys < end, other=0.0).to(tl.float32)
            share = tl.load(v_scales_ptr + stored, mask=keys < end, other=0.0).to(tl.float32)
        else:
            scale *= tl.load(k_scales_ptr + stored).to(tl.float32)
            share = tl.load(v_scales_ptr + stored).to(tl.float32)
        scale = scale[None, :]
    if WIDE:
        scores = tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32)) * scale
    else:
        scores = tl.dot(q, tl.trans(k)) * scale
    if MASKED:
        scores = tl.where(keys[None, :] <= length + tokens[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_top[:, None])
    kept = tl.exp2(top - new_top)
    total = total * kept + tl.sum(weights, axis=1)
    acc *= kept[:, None]
    if v_scales_ptr is not None:
        weights *= share[None, :]
    if WIDE:
        acc += tl.dot(weights, v.to(tl.float32))
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc)
    return new_top, total, acc


@triton.jit(do_not_specialize=["table_stride"])
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, qkv_ptr, out_ptr, tables_ptr, rows_ptr,
    positions_ptr, starts_ptr, table_stride, scale,
    PACKED: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """scale: of scores, times log2(e); ROWS: of a page; WIDE: products in FP32 (interpreter).

    PACKED: see `Packed`. Numbers of tokens count from the sequence's first one.
    """
    D: tl.constexpr = HEADS.dim
    Hkv: tl.constexpr = HEADS.kv
    Hq: tl.constexpr = HEADS.kv * HEADS.shared
    WIDTH: tl.constexpr = Hq * (2 if HEADS.gated else 1) + 2 * Hkv  # heads of a token
    head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest begin first
    begin, M, block, _ = sequence_of(block, starts_ptr, positions_ptr, PACKED, BLOCK_M, None)
    length = tl.load(positions_ptr + begin)
    if block * BLOCK_M >= M:  # padding
        return
    tokens = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d, offs_n = tl.arange(0, D), tl.arange(0, BLOCK_N)
    there = tokens[:, None] < M
    at = ((begin + tokens)[:, None] * Hq + head) * D + offs_d[None, :]
    q = tl.load(q_ptr + at, mask=there, other=0.0)
    table_ptr = tables_ptr + tl.load(rows_ptr + begin) * table_stride
    end = length + tl.minimum(M, (block + 1) * BLOCK_M)
    free = (length + block * BLOCK_M) // BLOCK_N * BLOCK_N  # keys that all tokens see
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, free, BLOCK_N):
        top, total, acc = _attended(
            q, top, total, acc, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr,
            start + offs_n, length, tokens, head, end, scale, HEADS, ROWS, False, WIDE,
        )  # fmt: skip
    for start in range(free, end, BLOCK_N):
        top, total, acc = _attended(
            q, top, total, acc, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr,
            start + offs_n, length, tokens, head, end, scale, HEADS, ROWS, True, WIDE,
        )  # fmt: skip
    out = acc / total[:, None]
    if HEADS.gated:
        gate = (begin + tokens)[:, None] * WIDTH * D + (2 * head + 1) * D + offs_d[None, :]
        out *= tl.sigmoid(tl.load(qkv_ptr + gate, mask=there, other=0.0).to(tl.float32))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=there)


def attention_prefill(qkv: Tensor, layer: AttentionLayer, pages: KVPages, step: Step) -> Tensor:
    """Attention of M tokens after those that their sequences have; see `Ops.attention`.

    Several sequences, and padding behind the tokens (`Step.starts`), are for the kernels alone, not
    for PyTorch's attention. They take nothing else of what the host knows of the step but how many
    sequences there are.

    Returns:
        [M, Hq * D] in the dtype of qkv; anything for padding.

    Raises:
        ValueError: see `prompt_ways`.
    """
    M, B = len(qkv), len(step.starts) - 1
    heads = heads_of(qkv, layer, pages)
    Hq, D = heads.queries, heads.dim
    ways = prompt_ways(M, B, D, card_of(qkv).is_hopper)
    q = torch.empty((M, Hq, D), dtype=qkv.dtype, device=qkv.device)
    stored = (*pages.layer(layer.index), *(pages.layer_scales(layer.index) or (None, None)))
    where = (step.tables, step.rows, step.positions, step.starts, step.tables.shape[1])
    rope, angles = step.rotation(layer.rope)
    run(
        _rotate_append_kernel,
        (M, triton.cdiv(Hq, BLOCK_H) + 2 * triton.cdiv(heads.kv, BLOCK_H)),
        qkv,
        layer.q_norm,
        layer.k_norm,
        rope.cos,
        rope.sin,
        q,
        *stored,
        *where,
        angles,
        layer.eps,
        SEQUENCES=B,
        HEADS=heads,
        BLOCK_H=BLOCK_H,
        ROWS=PAGE,
        num_warps=4,
        enable_fp_fusion=True,
    )
    if "torch" in ways:
        return _attend_with_torch(q, qkv, layer.gated, stored, step).reshape(M, Hq * D)
    out = torch.empty_like(q)
    scale = D**-0.5 * LOG2E
    for way, packed in ways.items():
        if way == "blocks":
            _attend_in_blocks(q, stored, qkv, out, where, scale, heads, packed)
            continue
        k, v = stored[:2]
        if pages.quantized:
            # Keys of a pack are at most max_kv_len in all, and B pages are not full
            room = step.tables.shape[1] if B == 1 else step.max_kv_len // PAGE + B
            k, v = widen_pages(stored, where, room, packed)
        plan = prompt_plan(heads, pages.quantized, packed)
        attend_on_hopper(q, k, v, qkv, out, where, scale, plan)
    return out.view(M, Hq * D)


def _attend_in_blocks(
    q: Tensor,
    stored: Stored,
    qkv: Tensor,
    out: Tensor,
    where: tuple[Tensor | int, ...],
    scale: float,
    heads: Heads,
    packed: Packed,
) -> None:
    """Attention by small programs; arguments as of `attend_on_hopper`."""
    launch = prompt_launch(heads.dim)
    run(
        _attend_kernel,
        (heads.queries, packed.blocks(len(q), launch.tokens)),
        q,
        *stored,
        qkv,
        out,
        *where,
        scale,
        PACKED=packed,
        HEADS=heads,
        BLOCK_M=launch.tokens,
        BLOCK_N=launch.keys,
        ROWS=PAGE,
        WIDE=qkv.device.type == "cpu",
        num_warps=launch.warps,
        num_stages=launch.stages,
        enable_fp_fusion=True,
    )


def _attend_with_torch(q: Tensor, qkv: Tensor, gated: bool, stored: Stored, step: Step) -> Tensor:
    """PyTorch's attention of one sequence's tokens: [M, Hq, D]."""
    (span,), (M, Hq, D) = step.spans, q.shape
    k, v = (_rows(*each, step, span, q.dtype) for each in zip(stored[:2], stored[2:], strict=True))
    mixed = _attend_many(q, k, v, span)
    if not gated:
        return mixed
    gate = qkv[:, : 2 * Hq * D].view(M, Hq, 2, D)[:, :, 1]
    return (mixed.float() * torch.sigmoid(gate.float())).to(qkv.dtype)


def _attend_many(q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
    """PyTorch's causal attention of q [M, Hq, D] over a sequence's k and v [T, Hkv, D].

    Without cuDNN, which torch prefers on Hopper: it builds a plan for every new length of a prompt.
    """
    before = cudnn_sdp_enabled()  # `sdpa_kernel` takes 50 times as long
    enable_cudnn_sdp(False)
    try:
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=_after(span.count, span.first) if span.first else None,
            is_causal=span.first == 0,
            enable_gqa=True,
        )
    finally:
        enable_cudnn_sdp(before)
    return out[0].transpose(0, 1)


def _rows(
    paged: Tensor, scales: Tensor | None, step: Step, span: Span, dtype: torch.dtype
) -> Tensor:
    """Keys or values up to the span's end, [T, Hkv, D]: a view where pages follow one another.

    Codes become numbers of this dtype.
    """
    if scales is not None:
        codes = _rows(paged, None, step, span, dtype).to(dtype)
        return codes.mul_(_rows(scales, None, step, span, dtype)[..., None])
    total = span.first + span.count
    count = pages_for(total)
    pages = span.pages[:count]
    if pages and pages == tuple(range(pages[0], pages[0] + count)):
        paged = paged[pages[0] : pages[0] + count]
    else:
        paged = paged.index_select(0, step.tables[span.row, :count])
    return paged.flatten(0, 1)[:total]


def _after(M: int, past: int) -> Tensor:
    """The causal mask of M tokens after others; its import costs what few first prompts need."""
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(M, past + M)
