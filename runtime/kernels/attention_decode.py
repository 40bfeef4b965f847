"""attention_decode: one token's q/k norm, rotation, cache append and attention over the cache.

    q, k  = rope(rms_norm(q) * q_norm), rope(rms_norm(k) * k_norm)      (per head, FP32)
    out_h = softmax(q_h . k[0 .. position] / sqrt(D)) @ v[0 .. position]     (* sigmoid(gate_h))

Layout  qkv [B, (Hq + 2 * Hkv) * D] bf16, each q head followed by its gate where gated; cache k, v
        [B * Hkv, T, D] bf16, position [B] int32 on the device: the row each token takes;
        out [B, Hq * D]
Bytes   4 * Hkv * D * position; 8 heads of 128 at position 8192: 33.6 MB = 7.4 us at 4.56 TB/s.
        Parts of the columns read the keys again, from L2
Plan    a program per kv head and split of the cache (or part of the columns, below), for the
        Hq / Hkv query heads that share the kv head: rows of one tensor-core tile, keys its columns,
        read from the cache as fragments. A warp norms and rotates a head for all of them; then
        every warp has keys and an online softmax of its own, joined in order at the end. Split 0
        also owns the new token. The number of splits is fixed by the cache's reach, the rows of a
        split follow the position: splits without rows return at once. A second kernel joins the
        splits, in order, so bit-reproducible (`attention_join`). A reach of 256 is not split: each
        program of a kv head takes all keys, and 64 columns of the values. Keys and values of
        earlier steps are on their way before the kernel waits for its predecessor, all of them
        where they are so few
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.access import (
    barrier,
    declaration,
    load4,
    load_shared16,
    shared_buffer,
    store_floats,
    store_shared4,
)
from lowbit.runtime.kernels.attention_fragments import (
    add_values,
    attend,
    key_scores,
    load_keys,
    load_queries,
    load_values,
    online_softmax,
    visible,
)
from lowbit.runtime.kernels.attention_join import join_splits, rows_of_split, weigh_warps
from lowbit.runtime.kernels.attention_rotate import load_angles, load_head_gains, rotated
from lowbit.runtime.kernels.device import multiprocessors, programmatic_launch, run
from lowbit.runtime.kernels.launch import attention_launch, join_bytes, row_bytes
from lowbit.runtime.kernels.mma import (
    across,
    as_float,
    from_lane,
    high_half,
    low_half,
    threads,
)
from lowbit.runtime.kernels.rotate import rotated_ref
from lowbit.runtime.state.cache import KVCache
from lowbit.runtime.state.rope import Rope

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


@gluon.jit
def _element(quad, g):
    """The first of the two columns of a part that a lane sums in its quad."""
    return (quad // 4 * 8 + g) * 8 + quad % 4 * 2


@gluon.jit
def _attention_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, position_ptr,
    part_ptr, state_ptr, out_ptr, T, eps, score_scale,
    SHARED: gl.constexpr, GATED: gl.constexpr, D: gl.constexpr, R: gl.constexpr,
    SPLITS: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr, AHEAD: gl.constexpr,
    WARPS: gl.constexpr, STRIDE: gl.constexpr, BUFFER: gl.constexpr, PDL: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """SPLITS of the keys or PARTS of the values' columns, of which a program takes one.

    AHEAD: a warp takes its keys in at most two turns, and the second's are loaded with the first's.
    """
    KEYS: gl.constexpr = 8 * BLOCKS  # of a warp at a time
    COLUMNS: gl.constexpr = D // PARTS
    SETS: gl.constexpr = (COLUMNS + 63) // 64
    WIDE: gl.constexpr = D > 128  # queries are too many registers
    WORD: gl.constexpr = gl.pointer_type(gl.int32)
    NORM: gl.constexpr = q_norm_ptr is not None
    FP32: gl.constexpr = NORM and q_norm_ptr.dtype.element_ty == gl.float32
    if PDL and EARLY:
        gdc_launch_dependents()
    warp, lane, zero, none = threads(WARPS)
    g = lane // 4
    t = lane % 4
    head, token = gl.program_id(0), gl.program_id(2)
    split = gl.program_id(1) if PARTS == 1 else gl.program_id(1) * 0
    column = gl.program_id(1) * COLUMNS if PARTS > 1 else gl.program_id(1) * 0
    Hkv = gl.num_programs(0)
    QUERY: gl.constexpr = 2 * D if GATED else D  # from one query to the next
    qkv_ptr += token * Hkv * (SHARED * QUERY + 2 * D)
    out_ptr += token * Hkv * SHARED * D
    position = gl.load(position_ptr + token)  # of an earlier step, like the cache: before the wait
    split_rows = rows_of_split(position, SPLITS, WARPS * KEYS)
    start = split * split_rows
    end = gl.minimum(start + split_rows, position)
    row = start + warp * KEYS
    cache = (token * Hkv + head).to(gl.int64) * T * (2 * D)
    k_base = k_ptr.to(gl.int64, bitcast=True) + cache
    v_base = v_ptr.to(gl.int64, bitcast=True) + cache + column.to(gl.int64) * 2
    keys = load_keys(k_base, row + g, end, t, row < end, D, BLOCKS)
    values = load_values(v_base, row + 2 * t, end, g, row < end, D, COLUMNS, BLOCKS)
    if AHEAD:
        later = row + WARPS * KEYS
        more_keys = load_keys(k_base, later + g, end, t, later < end, D, BLOCKS)
        more_values = load_values(v_base, later + 2 * t, end, g, later < end, D, COLUMNS, BLOCKS)
    cos = cos_ptr.to(gl.int64, bitcast=True)
    sin = sin_ptr.to(gl.int64, bitcast=True)
    q_gain = zero.to(gl.int64)
    k_gain = q_gain
    if NORM:
        q_gain += q_norm_ptr.to(gl.int64, bitcast=True)
        k_gain += k_norm_ptr.to(gl.int64, bitcast=True)
    ROWS: gl.constexpr = SHARED + 1  # the new key follows the queries
    angles = load_angles(cos, sin, position, lane, D, R)
    gains = ()
    for first in gl.static_range(0, ROWS, WARPS):
        gain = gl.where(first + warp < SHARED, q_gain, k_gain)
        gains = gains + (load_head_gains(gain, lane, NORM, FP32, D, R),)
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    if (start >= end) & (split > 0):
        return

    QUADS: gl.constexpr = 4 * SETS  # of sums a lane: elements d, d + 1 of heads 2 t, 2 t + 1
    qkv = qkv_ptr.to(gl.int64, bitcast=True)
    key = Hkv * SHARED * QUERY + head * D
    value = key + Hkv * D
    buffer = shared_buffer(BUFFER) + zero
    new_row = position.to(gl.int64) * (2 * D)
    for first in gl.static_range(0, ROWS, WARPS):
        row_of = first + warp
        x = gl.where(row_of < SHARED, (head * SHARED + row_of) * QUERY, key)
        words = rotated(
            qkv + x.to(gl.int64) * 2, gains[first // WARPS], angles, lane, none, eps,
            NORM, FP32, D, R,
        )  # fmt: skip
        for i in gl.static_range((D + 63) // 64):
            word = lane + 32 * i
            inside = (row_of < ROWS) & (word < D // 2)
            store_shared4(buffer + row_of * STRIDE + word * 4, as_float(words[i]), inside)
            mine = inside & (row_of == SHARED) & (gl.program_id(1) == 0)
            gl.store((k_base + new_row).to(WORD, bitcast=True) + word, words[i], mask=mine)
    barrier()
    q_at = buffer + gl.minimum(g, SHARED) * STRIDE + t * 16
    new_at = buffer + SHARED * STRIDE + t * 16
    q = q_at
    new_key = ()
    for j in gl.static_range((D + 31) // 32):
        new_key = new_key + (load_queries(new_at, j, t, D),)
    if not WIDE:
        q = ()
        for j in gl.static_range((D + 31) // 32):
            q = q + (load_queries(q_at, j, t, D),)
    buffer += ROWS * STRIDE
    first_score = key_scores(q, new_key, none, t, D, 1, WIDE)
    new_score = from_lane(first_score[0] * score_scale, g * 4)  # every column is the new key
    acc = ()
    for i in gl.static_range(QUADS):
        acc = acc + ((none, none, none, none),)
    top = new_score
    total = none
    if AHEAD:
        if end - start > WARPS * KEYS:
            top, total, acc = attend(
                top, total, acc, q, (keys, more_keys), (values, more_values), (row, later), end, t,
                none, score_scale, D, COLUMNS, BLOCKS, WIDE, True,
            )  # fmt: skip
        else:
            top, total, acc = attend(
                top, total, acc, q, (keys,), (values,), (row,), end, t, none, score_scale,
                D, COLUMNS, BLOCKS, WIDE, True,
            )  # fmt: skip
    else:
        for _ in range(start, end - WARPS * KEYS, WARPS * KEYS):
            scores = key_scores(q, keys, none, t, D, BLOCKS, WIDE)
            keys = load_keys(k_base, row + WARPS * KEYS + g, end, t, None, D, BLOCKS)
            scores = visible(scores, row, end, t, score_scale, BLOCKS)
            top, total, fade, p = online_softmax(top, total, scores)
            acc = add_values(acc, fade, p, values, none, t, COLUMNS, BLOCKS)
            row += WARPS * KEYS
            values = load_values(v_base, row + 2 * t, end, g, None, D, COLUMNS, BLOCKS)
        top, total, acc = attend(  # the last keys, or none at all
            top, total, acc, q, (keys,), (values,), (row,), end, t, none, score_scale,
            D, COLUMNS, BLOCKS, WIDE, False,
        )  # fmt: skip
    EACH: gl.constexpr = (QUADS + WARPS - 1) // WARPS  # quads of a warp, side by side
    new_values = ()
    gates = ()
    for each in gl.static_range(EACH):
        d = column + gl.minimum(_element(warp * EACH + each, g), COLUMNS - 2)
        new_values = new_values + (load4(qkv + (value + d).to(gl.int64) * 2),)
        if GATED and SPLITS == 1:
            for i in gl.static_range(2):
                gate = (head * SHARED + gl.minimum(2 * t + i, SHARED - 1)) * QUERY + D + d
                gates = gates + (load4(qkv + gate.to(gl.int64) * 2),)
    total += across(total, 1)
    total += across(total, 2)

    PAIRS: gl.constexpr = (SHARED + 1) // 2  # of heads: lanes from there on hold nothing
    QUAD: gl.constexpr = 128 * PAIRS  # bytes
    sums_at = buffer + 64 * WARPS + (g * PAIRS + gl.minimum(t, PAIRS - 1)) * 16
    tops, wholes, inverses, weights, news = weigh_warps(
        top, total, acc, new_score, split == 0, buffer, sums_at, warp, g, t, QUAD, PAIRS, WARPS
    )
    lines = ((), ())  # of each of the two heads
    for each in gl.static_range(EACH):
        quad = warp * EACH + each
        sums = (none, none, none, none)
        for w in gl.static_range(WARPS):
            part = load_shared16(sums_at + (w * QUADS + gl.minimum(quad, QUADS - 1)) * QUAD)
            sums = (
                sums[0] + weights[w] * as_float(part[0]),
                sums[1] + weights[WARPS + w] * as_float(part[1]),
                sums[2] + weights[w] * as_float(part[2]),
                sums[3] + weights[WARPS + w] * as_float(part[3]),
            )
        v = new_values[each]
        d = _element(quad, g)
        there = (quad < QUADS) & (d < COLUMNS)
        owned = there & (split == 0) & (t == 0)
        gl.store((v_base + new_row).to(WORD, bitcast=True) + d // 2, v, mask=owned)
        for i in gl.static_range(4):
            y = sums[i] + news[i % 2] * (low_half(v) if i // 2 == 0 else high_half(v))
            if SPLITS > 1:
                if i % 2 == 0:
                    lines = (lines[0] + (y,), lines[1])
                else:
                    lines = (lines[0], lines[1] + (y,))
            else:
                y *= inverses[i % 2]
                if GATED:
                    gate = gates[each * 2 + i % 2]
                    gate = low_half(gate) if i // 2 == 0 else high_half(gate)
                    y /= 1.0 + gl.exp(-gate)
                at = out_ptr + (head * SHARED + 2 * t + i % 2) * D + column + d + i // 2
                stored = there & (2 * t + i % 2 < SHARED)
                gl.store(at, y.to(out_ptr.dtype.element_ty), mask=stored)
    if SPLITS > 1:
        d = _element(warp * EACH, g)
        for i in gl.static_range(2):
            row = ((token * Hkv + head) * SHARED + 2 * t + i) * SPLITS + split
            stored = 2 * t + i < SHARED
            store_floats(part_ptr + row * D + d, lines[i], stored & (d < D) & (warp < QUADS))
            once = stored & (warp == 0) & (g == 0)
            store_floats(state_ptr + row * 2, (tops[i], wholes[i]), once)


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
    """Attention of one token of each of the cache's B sequences; see `Ops.attention`.

    Returns:
        [B, Hq * D] in the dtype of qkv.
    """
    B = qkv.shape[0]
    Hkv, T, D = cache.k.shape[1] // B, *cache.k.shape[2:]
    Hq = (qkv.shape[1] // D - 2 * Hkv) // (2 if gated else 1)
    shared = Hq // Hkv
    launch = attention_launch(B * Hkv, shared, cache.reach or T, D, multiprocessors(qkv))
    part = state = None
    if launch.splits > 1:
        part = torch.empty((B * Hq, launch.splits, D), dtype=torch.float32, device=qkv.device)
        state = torch.empty((B * Hq, launch.splits, 2), dtype=torch.float32, device=qkv.device)
    out = torch.empty((B, Hq * D), dtype=qkv.dtype, device=qkv.device)
    pdl = programmatic_launch(qkv)
    run(
        _attention_kernel,
        (Hkv, launch.splits * launch.parts, B),
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
        out,
        T,
        eps,
        D**-0.5 * LOG2_E,
        SHARED=shared,
        GATED=gated,
        D=D,
        R=2 * rope.cos.shape[1],
        SPLITS=launch.splits,
        PARTS=launch.parts,
        BLOCKS=launch.blocks,
        AHEAD=launch.ahead,
        WARPS=launch.warps,
        STRIDE=row_bytes(D),
        BUFFER=declaration(join_bytes(shared, D, launch.warps, launch.parts)),
        PDL=pdl,
        EARLY=launch.early and launch.splits == 1,
        num_warps=launch.warps,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    if part is not None and state is not None:
        join_splits(part, state, qkv, cache.position, out, launch.turn, launch.early, gated, pdl)
    return out
