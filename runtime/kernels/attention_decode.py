"""attention_decode: one token's q/k norm, rotation, cache append and attention over the cache.

    q, k  = rope(rms_norm(q) * q_norm), rope(rms_norm(k) * k_norm)      (per head, FP32)
    out_h = softmax(q_h . k[0 .. position] / sqrt(D)) @ v[0 .. position]     (* sigmoid(gate_h))

Layout  qkv [1, (Hq + 2 * Hkv) * D] bf16, each q head followed by its gate where gated; cache k, v
        [Hkv, T, D] bf16, position [1] int32 on the device: the row the token takes; out [1, Hq * D]
Bytes   4 * Hkv * D * position; 8 heads of 128 at position 8192: 33.6 MB = 7.4 us at 4.56 TB/s
Plan    a program per kv head and split of the cache; it holds the Hq / Hkv query heads that share
        the kv head as rows of a tensor-core tile. Split 0 also owns the new token. The number of
        splits is fixed by the context, the rows of a split follow the position: splits without rows
        return at once. A second kernel joins the splits in order; no atomics, so bit-reproducible
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.cache import KVCache
from lowbit.runtime.kernels.device import on_gpu, programmatic_launch
from lowbit.runtime.kernels.launch import attention_launch, join_warps
from lowbit.runtime.kernels.rotate import rotated, rotated_ref
from lowbit.runtime.ops import Rope

LOG2_E = 1.4426950408889634


def attention_decode_ref(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Rope,
    cache: KVCache,
    layer: int,
    gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The values `attention_decode` approximates, in float64.

    Queries and the new key are rounded to the cache's dtype before they meet, as in the kernel.

    Returns:
        out [1, Hq * D], and the new k and v [Hkv, D] (unrounded).
    """
    Hkv, D = cache.k.shape[1], cache.k.shape[3]
    position = int(cache.position)
    heads = qkv.double().view(-1, D)
    q, k, v = heads[: -2 * Hkv], heads[-2 * Hkv : -Hkv], heads[-Hkv:]
    gate = torch.ones_like(q)
    if gated:
        q, gate = q[0::2], q[1::2].sigmoid()
    q = rotated_ref(q, q_norm, eps, rope, position).to(cache.k.dtype).double()
    k = rotated_ref(k, k_norm, eps, rope, position)
    stored = k.to(cache.k.dtype).double()
    keys = torch.cat((cache.k[layer, :, :position].double(), stored[:, None]), dim=1)
    values = torch.cat((cache.v[layer, :, :position].double(), v[:, None]), dim=1)
    shared = q.shape[0] // Hkv
    keys, values = keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)
    scores = torch.softmax(torch.einsum("hd,htd->ht", q, keys) * D**-0.5, dim=-1)
    return (torch.einsum("ht,htd->hd", scores, values) * gate).view(1, -1), k, v


@triton.jit
def _split_rows(position, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Cache rows of one split, a multiple of BLOCK_T, for the tokens before `position`."""
    return tl.cdiv(tl.cdiv(position, SPLITS), BLOCK_T) * BLOCK_T


@triton.jit
def _attention_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    position_ptr,
    part_ptr,
    state_ptr,
    T,
    eps,
    score_scale,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    head, split = tl.program_id(0), tl.program_id(1)
    Hkv = tl.num_programs(0)
    offs_h = tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, D)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.load(position_ptr)
    split_rows = _split_rows(position, SPLITS, BLOCK_T)
    start = split * split_rows
    end = tl.minimum(start + split_rows, position)
    if (start >= end) & (split > 0):
        return

    q_heads = head * SHARED + offs_h
    is_q = offs_h < SHARED
    QUERY: tl.constexpr = 2 * D if GATED else D  # from one query to the next
    starts = q_heads * QUERY
    q = rotated(qkv_ptr, q_norm_ptr, cos_ptr, sin_ptr, starts, is_q, position, eps, D, R)
    operand = k_ptr.dtype.element_ty if NATIVE else tl.float32  # the interpreter's dot: FP32 only
    q = q.to(k_ptr.dtype.element_ty)  # [BLOCK_H, D]
    cache = head.to(tl.int64) * T * D

    starts = Hkv * SHARED * QUERY + head * D + tl.zeros([1], tl.int32)
    always = starts >= 0
    k_new = rotated(qkv_ptr, k_norm_ptr, cos_ptr, sin_ptr, starts, always, position, eps, D, R)
    k_new = k_new.to(k_ptr.dtype.element_ty)  # [1, D]
    v_new = tl.load(qkv_ptr + (starts + Hkv * D)[:, None] + offs_d[None, :])  # [1, D]
    first = split == 0
    new = cache + position * D + offs_d[None, :]
    if first:
        tl.store(k_ptr + new, k_new)
        tl.store(v_ptr + new, v_new)

    s_new = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1) * score_scale
    top = tl.where(first, s_new, float("-inf"))  # [BLOCK_H], in powers of two
    total = tl.where(first, 1.0, 0.0) + tl.zeros([BLOCK_H], tl.float32)
    acc = tl.where(first, v_new.to(tl.float32), 0.0) + tl.zeros([BLOCK_H, D], tl.float32)
    for t in tl.range(start, end, BLOCK_T):
        offs_t = t + tl.arange(0, BLOCK_T)
        inside = offs_t < end
        rows = cache + offs_t[:, None] * D + offs_d[None, :]
        k = tl.load(k_ptr + rows, mask=inside[:, None], other=0.0)  # [BLOCK_T, D]
        v = tl.load(v_ptr + rows, mask=inside[:, None], other=0.0)
        s = tl.dot(q.to(operand), tl.trans(k.to(operand))) * score_scale
        s = tl.where(inside[None, :], s, float("-inf"))  # [BLOCK_H, BLOCK_T]
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, axis=1)
        p = p.to(v_ptr.dtype.element_ty).to(operand)
        acc = acc * fade[:, None] + tl.dot(p, v.to(operand))
        top = new_top

    part = q_heads * SPLITS + split
    tl.store(part_ptr + part[:, None] * D + offs_d[None, :], acc, mask=is_q[:, None])
    tl.store(state_ptr + part * 2, top, mask=is_q)
    tl.store(state_ptr + part * 2 + 1, total, mask=is_q)


@triton.jit
def _join_kernel(
    part_ptr,
    state_ptr,
    position_ptr,
    qkv_ptr,
    out_ptr,
    GATED: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    offs_s = tl.arange(0, SPLITS)
    offs_d = tl.arange(0, D)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.load(position_ptr)
    held = (offs_s == 0) | (offs_s * _split_rows(position, SPLITS, BLOCK_T) < position)
    part = head * SPLITS + offs_s
    top = tl.load(state_ptr + part * 2, mask=held, other=float("-inf"))
    total = tl.load(state_ptr + part * 2 + 1, mask=held, other=0.0)
    acc = tl.load(part_ptr + part[:, None] * D + offs_d[None, :], mask=held[:, None], other=0.0)
    weight = tl.exp2(top - tl.max(top, axis=0))  # [SPLITS]
    out = tl.sum(acc * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    if GATED:
        out *= tl.sigmoid(tl.load(qkv_ptr + (2 * head + 1) * D + offs_d).to(tl.float32))
    tl.store(out_ptr + head * D + offs_d, out.to(out_ptr.dtype.element_ty))


def attention_decode(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Rope,
    cache: KVCache,
    layer: int,
    gated: bool = False,
) -> Tensor:
    """Attention of one token at the cache's device position; see `Ops.attention`.

    Returns:
        [1, Hq * D] in the dtype of qkv.
    """
    _, Hkv, T, D = cache.k.shape
    Hq = (qkv.shape[1] // D - 2 * Hkv) // (2 if gated else 1)
    launch = attention_launch(Hkv, T)
    part = torch.empty((Hq, launch.splits, D), dtype=torch.float32, device=qkv.device)
    state = torch.empty((Hq, launch.splits, 2), dtype=torch.float32, device=qkv.device)
    out = torch.empty((1, Hq * D), dtype=qkv.dtype, device=qkv.device)
    pdl = programmatic_launch(qkv)
    shared = Hq // Hkv
    _attention_kernel[(Hkv, launch.splits)](
        qkv,
        q_norm,
        k_norm,
        rope.cos,
        rope.sin,
        cache.k[layer],
        cache.v[layer],
        cache.position,
        part,
        state,
        T,
        eps,
        D**-0.5 * LOG2_E,
        SHARED=shared,
        GATED=gated,
        D=D,
        R=2 * rope.cos.shape[1],
        SPLITS=launch.splits,
        BLOCK_H=max(16, triton.next_power_of_2(shared)),
        BLOCK_T=launch.block_t,
        NATIVE=on_gpu(qkv),
        PDL=pdl,
        num_warps=4,
        num_stages=3 if D <= 128 else 2,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    _join_kernel[(Hq,)](
        part,
        state,
        cache.position,
        qkv,
        out,
        GATED=gated,
        D=D,
        SPLITS=launch.splits,
        BLOCK_T=launch.block_t,
        PDL=pdl,
        num_warps=join_warps(launch.splits, D),
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return out
