"""attend_on_hopper: causal attention of many tokens of a prompt, three warpgroups a program.

    out = softmax(q . k^T / sqrt(D) + causal) @ v      over the sequence's rows up to its end
    out *= sigmoid(gate)                               (where gated)

Layout  q [M, Hq, D] bf16, rotated; k, v in pages [P, PAGE, Hkv, D] bf16, the tokens' own rows
        included; qkv for its gates; out [M, Hq, D] bf16
Bytes   2 * 2*D*T of keys and values for each 128 tokens of a head, from the L2 cache mostly: the
        programs of heads that share them run beside each other
Plan    A program takes 128 tokens of a head over all keys, in order. One warpgroup copies keys and
        values, page by page, into a ring in shared memory; each of two others takes 64 tokens. It
        begins the scores of the next keys before it adds the values of these, and computes the
        softmax of the one while the tensor cores do the other (FlashAttention-3, arXiv 2407.08608)
"""

from dataclasses import dataclass
from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lowbit.formats.page_counts import PAGE
from lowbit.runtime.kernels.attention.heads import Heads
from lowbit.runtime.kernels.attention.packed import sequence_of
from lowbit.runtime.kernels.launch.attention import Packed
from lowbit.runtime.kernels.launch.device import run
from lowbit.runtime.kernels.ptx.wgmma import next_slot

TOKENS = 128  # of a program
ROWS = gl.constexpr(64)  # tokens of a warpgroup
WARPS = gl.constexpr(4)  # of each of them
# Registers of a thread: as launched, then of the second warpgroup that attends and of the one that
# copies; the first gets what is left.
LAUNCHED = 168
ATTENDING, COPYING = gl.constexpr(232), gl.constexpr(40)

# Later releases of Triton call it so.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """Constants of `attend_on_hopper`; made once, so compared by identity."""

    heads: Heads  # of the layer
    keys: int  # of a block, whole pages
    stages: int  # blocks of keys, and as many of values, on their way or in use
    page: int  # its rows
    # pages of the sequences taken follow one another, whatever the block tables say
    in_order: bool
    packed: Packed  # the sequences taken


@cache
def prompt_plan(heads: Heads, in_order: bool, packed: Packed) -> PromptPlan:
    """The plan for a layer's heads; others as in `PromptPlan`."""
    return PromptPlan(heads, 128 if heads.dim <= 128 else 64, 2, PAGE, in_order, packed)


@gluon.jit
def _copy_keys_and_values(
    k_ptr, v_ptr, table_ptr, kv, end, blocks, rings, full, empty, PLAN: gl.constexpr
):  # fmt: skip
    """Copy block after block of keys, then of values; rows from `end` on repeat the last."""
    HEADS: gl.constexpr = PLAN.heads
    PAGE: gl.constexpr = PLAN.page
    ALONG: gl.constexpr = min(HEADS.dim // 8, 32)  # lanes along a row, 16 bytes each
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ALONG, ALONG], [WARPS, 1], [1, 0])
    row = gl.arange(0, PAGE, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, HEADS.dim, gl.SliceLayout(0, LAYOUT))[None, :]
    last = (end - 1) // PAGE
    slot = blocks * 0
    phase = blocks * 0
    for block in range(blocks):
        for values in gl.static_range(2):
            mbarrier.wait(empty[values].index(slot), phase ^ 1)
            for i in gl.static_range(PLAN.keys // PAGE):
                page = gl.minimum(block * (PLAN.keys // PAGE) + i, last)
                at = page if PLAN.in_order else gl.load(table_ptr + page)
                stored = at.to(gl.int64) * (PAGE * HEADS.kv) + kv
                inside = gl.minimum(row, end - 1 - page * PAGE) * (HEADS.kv * HEADS.dim)
                base = (v_ptr if values else k_ptr) + stored * HEADS.dim
                copy_async(
                    rings[values].index(slot).slice(i * PAGE, PAGE), base + inside[:, None] + column
                )
            async_copy.mbarrier_arrive(full[values].index(slot), increment_count=False)
        slot, phase = next_slot(slot, phase, PLAN.stages)


@gluon.jit
def _weights(scores, top, total, first_key, position, scale, MASKED: gl.constexpr):
    """Online softmax: weights of a block's keys, and how much of earlier sums is kept.

    top: of scores before `scale`, which includes log2(e); position [ROWS]: of the tokens. MASKED:
    some keys come after some tokens.
    """
    if MASKED:
        COLUMNS: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        key = first_key + gl.arange(0, scores.shape[1], COLUMNS)
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    weights = gl.exp2(scores * scale - (new_top * scale)[:, None])
    kept = gl.exp2((top - new_top) * scale)
    return weights, new_top, total * kept + gl.sum(weights, axis=1), kept


@gluon.jit
def _scores(q, ring, slot, full, phase, PLAN: gl.constexpr):
    """Begin the scores of a block of keys once they are there."""
    KEYS: gl.constexpr = PLAN.keys
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    mbarrier.wait(full.index(slot), phase)
    hopper.fence_async_shared()  # what the other warpgroup copied becomes visible to wgmma
    zero_f32 = gl.zeros([ROWS, KEYS], gl.float32, LAYOUT)
    k = ring.index(slot).permute((1, 0))
    return hopper.warpgroup_mma(q, k, zero_f32, use_acc=False, is_async=True)


@gluon.jit
def _one_more(
    q, p, acc, top, total, block, slot, phase, position, scale, rings, full, empty,
    PLAN: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Begin the scores of a block, add the values of the one before, then weigh the block.

    slot, phase: of the block before.
    """
    before = slot
    before_phase = phase
    slot, phase = next_slot(slot, phase, PLAN.stages)
    begun = _scores(q, rings[0], slot, full[0], phase, PLAN)
    mbarrier.wait(full[1].index(before), before_phase)
    hopper.fence_async_shared()
    adding = hopper.warpgroup_mma(p, rings[1].index(before), acc, is_async=True)
    scores = hopper.warpgroup_mma_wait(1, deps=(begun,))
    mbarrier.arrive(empty[0].index(slot))
    weights, top, total, kept = _weights(
        scores, top, total, block * PLAN.keys, position, scale, MASKED
    )
    acc = hopper.warpgroup_mma_wait(0, deps=(adding,))
    mbarrier.arrive(empty[1].index(before))
    acc *= gl.convert_layout(kept, gl.SliceLayout(1, acc.type.layout))[:, None]
    p = gl.convert_layout(weights.to(gl.bfloat16), p.type.layout)
    return p, acc, top, total, slot, phase


@gluon.jit
def _attend(
    q_ptr, qkv_ptr, out_ptr, first, head, M, length, free, blocks, scale, q, rings, full, empty,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Attend for ROWS tokens from `first` on. free: blocks of keys that all of them see."""
    HEADS: gl.constexpr = PLAN.heads
    D: gl.constexpr = HEADS.dim
    Hq: gl.constexpr = HEADS.kv * HEADS.shared
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PLAN.keys, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    ALONG: gl.constexpr = min(D // 8, 32)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ALONG, ALONG], [WARPS, 1], [1, 0])
    token = first + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    column = gl.arange(0, D, gl.SliceLayout(0, LOADED))[None, :]
    at = (token * Hq + head)[:, None] * D + column
    q.store(gl.load(q_ptr + at, mask=(token < M)[:, None], other=0.0))
    hopper.fence_async_shared()
    position = length + first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, D], gl.float32, SUMS)
    slot = blocks * 0
    phase = blocks * 0
    begun = _scores(q, rings[0], slot, full[0], phase, PLAN)
    scores = hopper.warpgroup_mma_wait(0, deps=(begun,))
    mbarrier.arrive(empty[0].index(slot))
    weights, top, total, _ = _weights(scores, top, total, 0, position, scale, True)
    p = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, SUMS, 2))
    for block in range(1, free):
        p, acc, top, total, slot, phase = _one_more(
            q, p, acc, top, total, block, slot, phase, position, scale, rings, full, empty, PLAN,
            False,
        )  # fmt: skip
    for block in range(gl.maximum(free, 1), blocks):
        p, acc, top, total, slot, phase = _one_more(
            q, p, acc, top, total, block, slot, phase, position, scale, rings, full, empty, PLAN,
            True,
        )  # fmt: skip
    mbarrier.wait(full[1].index(slot), phase)
    hopper.fence_async_shared()
    acc = hopper.warpgroup_mma(p, rings[1].index(slot), acc)
    out = acc / gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
    token = first + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    column = gl.arange(0, D, gl.SliceLayout(0, SUMS))[None, :]
    there = (token < M)[:, None]
    if HEADS.gated:
        row = token * (2 * Hq + 2 * HEADS.kv) + 2 * head + 1
        gate = gl.load(qkv_ptr + row[:, None] * D + column, mask=there, other=0.0)
        out *= 1.0 / (1.0 + gl.exp(-gate.to(gl.float32)))
    at = (token * Hq + head)[:, None] * D + column
    gl.store(out_ptr + at, out.to(gl.bfloat16), mask=there)


@gluon.jit(do_not_specialize=["table_stride"])
def _attend_on_hopper_kernel(
    q_ptr, k_ptr, v_ptr, qkv_ptr, out_ptr, tables_ptr, rows_ptr, positions_ptr, starts_ptr,
    table_stride, scale, PLAN: gl.constexpr,
):  # fmt: skip
    """scale: of scores, times log2(e). Numbers of tokens count from the sequence's first one."""
    HEADS: gl.constexpr = PLAN.heads
    D: gl.constexpr = HEADS.dim
    STAGES: gl.constexpr = PLAN.stages
    PACKED: gl.constexpr = PLAN.packed
    ORDERED_ROWS: gl.constexpr = PLAN.page if PLAN.in_order else None  # of a page
    Hq: gl.constexpr = HEADS.kv * HEADS.shared
    WIDTH: gl.constexpr = Hq * (2 if HEADS.gated else 1) + 2 * HEADS.kv  # heads of a token
    head = gl.program_id(0)
    block = gl.num_programs(1) - 1 - gl.program_id(1)  # the longest begin first
    begin, M, block, pages = sequence_of(
        block, starts_ptr, positions_ptr, PACKED, 2 * ROWS, ORDERED_ROWS
    )
    first = block * (2 * ROWS)
    length = gl.load(positions_ptr + begin)
    q_ptr += begin * (Hq * D)
    out_ptr += begin * (Hq * D)
    qkv_ptr += begin * (WIDTH * D)
    k_ptr += gl.cast(pages, gl.int64) * (PLAN.page * HEADS.kv * D)
    v_ptr += gl.cast(pages, gl.int64) * (PLAN.page * HEADS.kv * D)
    end = length + gl.minimum(M, first + 2 * ROWS)
    blocks = gl.where(first < M, (end + PLAN.keys - 1) // PLAN.keys, 0)
    if blocks > 0:  # else padding
        free = (length + first + 1) // PLAN.keys
        SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
        BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
        q = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, D], SHARED)
        k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PLAN.keys, D], SHARED)
        v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PLAN.keys, D], SHARED)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=32 * WARPS)
            mbarrier.init(v_full.index(i), count=32 * WARPS)
            mbarrier.init(k_empty.index(i), count=2)
            mbarrier.init(v_empty.index(i), count=2)
        rings = (k_ring, v_ring)
        full = (k_full, v_full)
        empty = (k_empty, v_empty)
        table_ptr = tables_ptr + gl.load(rows_ptr + begin) * table_stride
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        q_ptr, qkv_ptr, out_ptr, first, head, M, length, free, blocks, scale,
                        q.index(0), rings, full, empty, PLAN,
                    ),
                ),
                (
                    _attend,
                    (
                        q_ptr, qkv_ptr, out_ptr, first + ROWS, head, M, length, free, blocks,
                        scale, q.index(1), rings, full, empty, PLAN,
                    ),
                ),
                (
                    _copy_keys_and_values,
                    (
                        k_ptr, v_ptr, table_ptr, head // HEADS.shared, end, blocks, rings, full,
                        empty, PLAN,
                    ),
                ),
            ],
            [WARPS, WARPS],
            [ATTENDING, COPYING],
        )  # fmt: skip


def attend_on_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qkv: Tensor,
    out: Tensor,
    where: tuple[Tensor | int, ...],
    scale: float,
    plan: PromptPlan,
) -> None:
    """Attention of the sequences of a chunk of prompts that are taken; see above.

    Args:
        q: [M, Hq, D] bfloat16.
        k: keys of the layer, in pages [P, PAGE, Hkv, D] bfloat16.
        v: values of the layer, in as many pages.
        qkv: [M, width], of which gates are read.
        out: [M, Hq, D] bfloat16, written for the tokens of these sequences.
        where: the step's block tables, rows, positions, starts, and the tables' row stride.
        scale: of scores, times log2(e).
        plan: constants; D is one of `launch.attention.HOPPER_DIMS`.
    """
    run(
        _attend_on_hopper_kernel,
        (plan.heads.queries, plan.packed.blocks(len(q), TOKENS)),
        q,
        k,
        v,
        qkv,
        out,
        *where,
        scale,
        PLAN=plan,
        num_warps=WARPS.value,
        maxnreg=LAUNCHED,
        enable_fp_fusion=True,
    )
