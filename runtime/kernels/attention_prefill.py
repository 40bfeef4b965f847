"""attention_prefill: q/k norm, rotation and cache append of M tokens, then causal attention.

    q, k = rope(rms_norm(q) * q_norm), rope(rms_norm(k) * k_norm)       (per head, FP32)
    out  = softmax(q . k^T / sqrt(D) + causal) @ v over the cache's first length + M rows
    out *= sigmoid(gate)                                                (where gated)

Layout  qkv [M, (Hq + 2 * Hkv) * D] bf16, each q head followed by its gate where gated; cache k, v
        [Hkv, T, D] bf16; token m takes row length + m
Plan    one Triton program per token and head writes q aside and k, v into the cache. Attention of
        many tokens is PyTorch's (flash attention on a GPU); that of few, which would wait for the
        host, one kernel: a program takes 16 tokens of a head over all keys, its softmax as it goes
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowbit.runtime.kernels.device import run
from lowbit.runtime.kernels.rotate import rotated, rotated_ref
from lowbit.runtime.state.cache import KVCache
from lowbit.runtime.state.rope import Rope

# Without cuDNN, which torch prefers on Hopper: it builds a plan for every new length of a prompt.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LOG2E = math.log2(math.e)
FEW_TOKENS = 128
BLOCK_M = 16  # tokens of a program


def attention_prefill_ref(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Rope,
    cache: KVCache,
    layer: int,
    gated: bool = False,
) -> Tensor:
    """The value `attention_prefill` approximates: [M, Hq * D] float64; the cache is not written.

    Queries and keys are rounded to the cache's dtype before they meet, as in the kernels.
    """
    M, Hkv, D = qkv.shape[0], cache.k.shape[1], cache.k.shape[3]
    heads = qkv.double().view(M, -1, D)
    q, k, v = heads[:, : -2 * Hkv], heads[:, -2 * Hkv : -Hkv], heads[:, -Hkv:]
    gate = torch.ones_like(q)
    if gated:
        q, gate = q[:, 0::2], q[:, 1::2].sigmoid()
    past = cache.length
    q = torch.stack([rotated_ref(q[m], q_norm, eps, rope, past + m) for m in range(M)], dim=1)
    k = torch.stack([rotated_ref(k[m], k_norm, eps, rope, past + m) for m in range(M)], dim=1)
    keys = torch.cat((cache.k[layer, :, :past].double(), k.to(cache.k.dtype).double()), dim=1)
    values = torch.cat((cache.v[layer, :, :past].double(), v.transpose(0, 1)), dim=1)
    shared = q.shape[0] // Hkv
    q = q.to(cache.k.dtype).double()
    scores = q @ keys.repeat_interleave(shared, 0).transpose(1, 2) * D**-0.5  # [Hq, M, past + M]
    hidden = torch.ones(M, past + M, dtype=torch.bool, device=qkv.device).triu(past + 1)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    mixed = (weights @ values.repeat_interleave(shared, 0)).transpose(0, 1)
    return (mixed * gate).reshape(M, -1)


@triton.jit(do_not_specialize=["length"])  # else every class of prompt lengths compiles anew
def _rotate_append_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    length,
    T,
    eps,
    Hq: tl.constexpr,
    Hkv: tl.constexpr,
    GATED: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
):
    QUERY: tl.constexpr = 2 * D if GATED else D  # from one query to the next
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_d = tl.arange(0, D)
    x_ptr = qkv_ptr + token * (Hq * QUERY + 2 * Hkv * D)
    appended = Hq * QUERY + (head - Hq) * D  # where a head of k or v starts
    one = tl.zeros([1], tl.int32)
    start = one + head * QUERY
    row = length + token
    if head < Hq:
        q = rotated(x_ptr, q_norm_ptr, cos_ptr, sin_ptr, start, one == 0, row, eps, D, R)
        out = q_ptr + (token * Hq + head) * D + offs_d[None, :]
        tl.store(out, q.to(q_ptr.dtype.element_ty))
    elif head < Hq + Hkv:
        k = rotated(x_ptr, k_norm_ptr, cos_ptr, sin_ptr, one + appended, one == 0, row, eps, D, R)
        out = k_ptr + ((head - Hq) * T + row) * D + offs_d[None, :]
        tl.store(out, k.to(k_ptr.dtype.element_ty))
    else:
        v = tl.load(x_ptr + appended + offs_d)
        tl.store(v_ptr + ((head - Hq - Hkv) * T + row) * D + offs_d, v)


@triton.jit(do_not_specialize=["M", "length"])
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    qkv_ptr,
    out_ptr,
    M,
    length,
    T,
    scale,
    Hq: tl.constexpr,
    Hkv: tl.constexpr,
    GATED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):
    """scale: of scores, times log2(e); WIDE: products in FP32, for Triton's interpreter."""
    head = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d, offs_n = tl.arange(0, D), tl.arange(0, BLOCK_N)
    there = tokens[:, None] < M
    at = (tokens[:, None] * Hq + head) * D + offs_d[None, :]
    q = tl.load(q_ptr + at, mask=there, other=0.0)
    first = (head // (Hq // Hkv)).to(tl.int64) * T * D
    end = length + tl.minimum(M, (tl.program_id(1) + 1) * BLOCK_M)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, end, BLOCK_N):
        keys = start + offs_n
        rows = first + keys[:, None] * D + offs_d[None, :]
        inside = keys[:, None] < end
        k = tl.load(k_ptr + rows, mask=inside, other=0.0)
        v = tl.load(v_ptr + rows, mask=inside, other=0.0)
        if WIDE:
            scores = tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32)) * scale
        else:
            scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(keys[None, :] <= length + tokens[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        kept = tl.exp2(top - new_top)
        total = total * kept + tl.sum(weights, axis=1)
        acc *= kept[:, None]
        if WIDE:
            acc += tl.dot(weights, v.to(tl.float32))
        else:
            acc += tl.dot(weights.to(v.dtype), v)
        top = new_top
    out = acc / total[:, None]
    if GATED:
        gate = tokens[:, None] * (2 * Hq + 2 * Hkv) * D + (2 * head + 1) * D + offs_d[None, :]
        out *= tl.sigmoid(tl.load(qkv_ptr + gate, mask=there, other=0.0).to(tl.float32))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=there)


def attention_prefill(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Rope,
    cache: KVCache,
    layer: int,
    gated: bool = False,
) -> Tensor:
    """Attention of M tokens after the cache's `length` tokens; see `Ops.attention`.

    Returns:
        [M, Hq * D] in the dtype of qkv.
    """
    _, Hkv, T, D = cache.k.shape
    M, past = qkv.shape[0], cache.length
    Hq = (qkv.shape[1] // D - 2 * Hkv) // (2 if gated else 1)
    q = torch.empty((M, Hq, D), dtype=qkv.dtype, device=qkv.device)
    keys, values = cache.k[layer], cache.v[layer]
    run(
        _rotate_append_kernel,
        (M, Hq + 2 * Hkv),
        qkv,
        q_norm,
        k_norm,
        rope.cos,
        rope.sin,
        q,
        keys,
        values,
        past,
        T,
        eps,
        Hq=Hq,
        Hkv=Hkv,
        GATED=gated,
        D=D,
        R=2 * rope.cos.shape[1],
        num_warps=1,
        enable_fp_fusion=True,
    )
    if M <= FEW_TOKENS:
        few = torch.empty_like(q)
        run(
            _attend_kernel,
            (Hq, triton.cdiv(M, BLOCK_M)),
            q,
            keys,
            values,
            qkv,
            few,
            M,
            past,
            T,
            D**-0.5 * LOG2E,
            Hq=Hq,
            Hkv=Hkv,
            GATED=gated,
            D=D,
            BLOCK_M=BLOCK_M,
            BLOCK_N=64 if D <= 128 else 32,  # two programs in 99 KB of shared memory
            WIDE=qkv.device.type == "cpu",
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=True,
        )
        return few.view(M, Hq * D)
    with sdpa_kernel(BACKENDS):
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None, :, : past + M],
            values[None, :, : past + M],
            attn_mask=_after(M, past) if past else None,
            is_causal=past == 0,
            enable_gqa=True,
        )
    mixed = out[0].transpose(0, 1)  # [M, Hq, D]
    if gated:
        gate = qkv[:, : 2 * Hq * D].view(M, Hq, 2, D)[:, :, 1]
        mixed = (mixed.float() * torch.sigmoid(gate.float())).to(qkv.dtype)
    return mixed.reshape(M, Hq * D)


def _after(M: int, past: int) -> Tensor:
    """The causal mask of M tokens after others; its import costs what few first prompts need."""
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(M, past + M)
