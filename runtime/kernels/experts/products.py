"""experts_products: blocks of tokens times the expert of each block.

    act[p] = silu(gate_e @ h[p // slots]) * (up_e @ h[p // slots])          (p in order of experts)
    out[p] = share[p] * down_e @ act[p]                                     (FP32, p by token)

Layout  h [M, K] bf16, order and blocks of `experts_order`, weights in tiles of all experts
        (`tiled_experts`) -> act [P, I] bf16, out [P, N] fp32
Plan    a program takes a block and some tiles. Codes become BF16 weights in registers, rounded once
        as those of `widen` are: they are the A operand of tensor cores as they lie, and tokens are
        columns. Blocks of few tokens take a shorter loop
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.experts.multiply import begin, chunk_row, multiply, stage_bytes, tile_of
from lowbit.runtime.kernels.experts.tiled import TiledExperts
from lowbit.runtime.kernels.launch.device import run, shared_limit
from lowbit.runtime.kernels.launch.experts import GemmLaunch, GemmTiles
from lowbit.runtime.kernels.linear.tiles import SCALES
from lowbit.runtime.kernels.ptx.memory import large_shared_buffer, large_size, recomputed, worth
from lowbit.runtime.kernels.ptx.mma import threads


@gluon.jit(do_not_specialize=["width", "tiles"])
def _experts_gate_up_gemm_kernel(
    h_ptr, order_ptr, blocks_ptr, words_ptr, scales_ptr, act_ptr, width, tiles,
    SLOTS: gl.constexpr, K: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr,
    SCALES: gl.constexpr, R: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr,
    LEAST: gl.constexpr, WARPS: gl.constexpr, PASSES: gl.constexpr,
    STAGES: gl.constexpr, STAGE: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """LEAST: tokens of the shortest loop, lengths are its multiples. STAGE: bytes of a turn."""
    warp, lane, zero, none = threads(WARPS)
    block = blocks_ptr + gl.program_id(1) * 3
    first = gl.load(block + 1)
    end = gl.load(block + 2)
    buffer = large_shared_buffer(tiles < 0, SHARED, WARPS) + zero
    if worth(first < end):
        words, scales = _expert_at(
            words_ptr, scales_ptr, gl.load(block), tiles, lane, K, G, BITS, SCALES
        )  # fmt: skip
        SHORTER: gl.constexpr = ROWS // LEAST - 1
        if worth(end - first > SHORTER * LEAST):
            _gate_up(
                h_ptr, order_ptr, act_ptr, width, words, scales, tiles, buffer, first, end, warp,
                lane, none, SLOTS, K, G, BITS, SCALES, R, C, ROWS, WARPS, PASSES, STAGES, STAGE,
            )  # fmt: skip
        else:
            for i in gl.static_range(SHORTER):
                if (end - first > i * LEAST) & (end - first <= (i + 1) * LEAST):
                    _gate_up(
                        h_ptr, order_ptr, act_ptr, width, words, scales, tiles, buffer, first, end,
                        warp, lane, none, SLOTS, K, G, BITS, SCALES, R, C, (i + 1) * LEAST, WARPS,
                        PASSES, STAGES, STAGE,
                    )  # fmt: skip


@gluon.jit(do_not_specialize=["N", "tiles"])
def _experts_down_gemm_kernel(
    act_ptr, order_ptr, blocks_ptr, shares_ptr, words_ptr, scales_ptr, out_ptr, N, tiles,
    K: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr, SCALES: gl.constexpr, R: gl.constexpr,
    C: gl.constexpr, ROWS: gl.constexpr, LEAST: gl.constexpr, WARPS: gl.constexpr,
    PASSES: gl.constexpr, STAGES: gl.constexpr, STAGE: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """LEAST, STAGE: see `_experts_gate_up_gemm_kernel`."""
    warp, lane, zero, none = threads(WARPS)
    block = blocks_ptr + gl.program_id(1) * 3
    first = gl.load(block + 1)
    end = gl.load(block + 2)
    buffer = large_shared_buffer(tiles < 0, SHARED, WARPS) + zero
    if worth(first < end):
        words, scales = _expert_at(
            words_ptr, scales_ptr, gl.load(block), tiles, lane, K, G, BITS, SCALES
        )  # fmt: skip
        SHORTER: gl.constexpr = ROWS // LEAST - 1
        if worth(end - first > SHORTER * LEAST):
            _down(
                act_ptr, order_ptr, shares_ptr, out_ptr, N, words, scales, tiles, buffer, first,
                end, warp, lane, none, K, G, BITS, SCALES, R, C, ROWS, WARPS, PASSES, STAGES, STAGE,
            )  # fmt: skip
        else:
            for i in gl.static_range(SHORTER):
                if (end - first > i * LEAST) & (end - first <= (i + 1) * LEAST):
                    _down(
                        act_ptr, order_ptr, shares_ptr, out_ptr, N, words, scales, tiles, buffer,
                        first, end, warp, lane, none, K, G, BITS, SCALES, R, C, (i + 1) * LEAST,
                        WARPS, PASSES, STAGES, STAGE,
                    )  # fmt: skip


@gluon.jit
def _expert_at(
    words_ptr, scales_ptr, expert, tiles, lane,
    K: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Addresses of a lane's first words and scales of an expert."""
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    TILE_SCALES: gl.constexpr = K // G * (64 if SCALES == "fp32" else 32)
    own = expert.to(gl.int64) * tiles
    words = words_ptr.to(gl.int64, bitcast=True) + own * (STEPS * 1024) + lane * 16
    scales = scales_ptr.to(gl.int64, bitcast=True) + own * TILE_SCALES
    return words, scales + lane // 4 * (8 if SCALES == "fp32" else 4)


@gluon.jit
def _gate_up(
    h_ptr, order_ptr, act_ptr, width, words, scales, tiles, buffer, first, end, warp, lane, none,
    SLOTS: gl.constexpr, K: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr,
    SCALES: gl.constexpr, R: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr,
    WARPS: gl.constexpr, PASSES: gl.constexpr, STAGES: gl.constexpr, STAGE: gl.constexpr,
):  # fmt: skip
    CHUNKS: gl.constexpr = C * 64 // BITS
    thread = warp * 32 + lane
    x = ()
    for i in gl.static_range((ROWS * CHUNKS + WARPS * 32 - 1) // (WARPS * 32)):
        place = gl.minimum(
            first + chunk_row(thread, i, BITS, C, ROWS, WARPS), gl.maximum(end - 1, 0)
        )
        token = (gl.load(order_ptr + place) // SLOTS).to(gl.int64)
        x = x + (h_ptr.to(gl.int64, bitcast=True) + token * (2 * K) + thread % CHUNKS * 16,)
    begin(
        words, scales, x, buffer, tiles, warp, lane,
        K, G, BITS, SCALES, R, C, ROWS, WARPS, PASSES, STAGES, STAGE,
    )  # fmt: skip
    TURNS: gl.constexpr = (K * BITS + 511) // 512 // C
    read_at = lane * 0
    write_at = lane * 0 + (STAGES - 1) * STAGE
    for turn in range(0, PASSES * TURNS, TURNS):
        acc, read_at, write_at = multiply(
            words, scales, x, buffer, read_at, write_at, turn, tiles, warp, lane, none,
            K, G, BITS, SCALES, R, C, ROWS, WARPS, PASSES, STAGES, STAGE,
        )  # fmt: skip
        tile = tile_of(turn, tiles, warp, TURNS, R, WARPS, PASSES)
        _store_act(acc, act_ptr, width, tile, first, end, recomputed(lane), R, ROWS)


@gluon.jit
def _store_act(acc, act_ptr, width, tile, first, end, lane, R: gl.constexpr, ROWS: gl.constexpr):
    for i in gl.static_range(ROWS // 8):
        for e in gl.static_range(2):
            place = first + i * 8 + lane % 4 * 2 + e
            at = act_ptr + place.to(gl.int64) * width
            for r in gl.static_range(R):
                gate = acc[i * R + r][e]
                act = gate / (1.0 + gl.exp(-gate)) * acc[i * R + r][2 + e]
                n = (tile + r) * 8 + lane // 4
                inside = (place < end) & (n < width)
                gl.store(at + n, act.to(act_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _down(
    act_ptr, order_ptr, shares_ptr, out_ptr, N, words, scales, tiles, buffer, first, end,
    warp, lane, none, K: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr, SCALES: gl.constexpr,
    R: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, PASSES: gl.constexpr,
    STAGES: gl.constexpr, STAGE: gl.constexpr,
):  # fmt: skip
    CHUNKS: gl.constexpr = C * 64 // BITS
    thread = warp * 32 + lane
    x = ()
    for i in gl.static_range((ROWS * CHUNKS + WARPS * 32 - 1) // (WARPS * 32)):
        place = gl.minimum(
            first + chunk_row(thread, i, BITS, C, ROWS, WARPS), gl.maximum(end - 1, 0)
        )
        at = place.to(gl.int64) * (2 * K) + thread % CHUNKS * 16
        x = x + (act_ptr.to(gl.int64, bitcast=True) + at,)
    begin(
        words, scales, x, buffer, tiles, warp, lane,
        K, G, BITS, SCALES, R, C, ROWS, WARPS, PASSES, STAGES, STAGE,
    )  # fmt: skip
    TURNS: gl.constexpr = (K * BITS + 511) // 512 // C
    read_at = lane * 0
    write_at = lane * 0 + (STAGES - 1) * STAGE
    for turn in range(0, PASSES * TURNS, TURNS):
        acc, read_at, write_at = multiply(
            words, scales, x, buffer, read_at, write_at, turn, tiles, warp, lane, none,
            K, G, BITS, SCALES, R, C, ROWS, WARPS, PASSES, STAGES, STAGE,
        )  # fmt: skip
        tile = tile_of(turn, tiles, warp, TURNS, R, WARPS, PASSES)
        _store_out(
            acc, order_ptr, shares_ptr, out_ptr, N, tile, first, end, recomputed(lane), R, ROWS
        )  # fmt: skip


@gluon.jit
def _store_out(
    acc, order_ptr, shares_ptr, out_ptr, N, tile, first, end, lane,
    R: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    for i in gl.static_range(ROWS // 8):
        for e in gl.static_range(2):
            place = first + i * 8 + lane % 4 * 2 + e
            pair = gl.load(order_ptr + gl.minimum(place, gl.maximum(end - 1, 0)))
            share = gl.load(shares_ptr + pair)
            at = out_ptr + pair * N
            for r in gl.static_range(R):
                for half in gl.static_range(2):
                    n = (tile + r) * 16 + half * 8 + lane // 4
                    inside = (place < end) & (n < N)
                    gl.store(at + n, share * acc[i * R + r][2 * half + e], mask=inside)


def gate_up_blocks(
    h: Tensor, order: Tensor, blocks: Tensor, w: TiledExperts, slots: int, launch: GemmLaunch
) -> Tensor:
    """The act of every pair in the order of experts: [P, I]."""
    inner, tiles = w.N // 2, launch.gate_up
    act = torch.empty((len(order), inner), dtype=h.dtype, device=h.device)
    run(
        _experts_gate_up_gemm_kernel,
        (_programs(w, tiles), len(blocks)),
        h,
        order,
        blocks,
        w.words,
        w.scales.view(torch.int32),
        act,
        inner,
        w.tiles,
        SLOTS=slots,
        **_constants(w, launch.rows, tiles),
    )
    return act


def down_blocks(
    act: Tensor, order: Tensor, blocks: Tensor, shares: Tensor, w: TiledExperts, launch: GemmLaunch
) -> Tensor:
    """Multiply the act of every pair by down and its share: [P, N] float32, by token and slot."""
    out = torch.empty((len(order), w.N), dtype=torch.float32, device=act.device)
    run(
        _experts_down_gemm_kernel,
        (_programs(w, launch.down), len(blocks)),
        act,
        order,
        blocks,
        shares,
        w.words,
        w.scales.view(torch.int32),
        out,
        w.N,
        w.tiles,
        **_constants(w, launch.rows, launch.down),
    )
    return out


def _programs(w: TiledExperts, launch: GemmTiles) -> int:
    """Programs of a block; the last ones share tiles where they do not divide."""
    return -(-w.tiles // (min(launch.tiles, w.tiles) * launch.warps * launch.passes))


def _constants(w: TiledExperts, rows: int, launch: GemmTiles) -> dict[str, Any]:
    """Constants and options of both kernels."""
    steps = launch.steps if w.steps % launch.steps == 0 else 1
    if launch.warps * 32 % (2 * steps * 64 // w.bits):
        raise ValueError(f"{launch} copies no whole pairs of rows of x at a time")
    tiles = min(launch.tiles, w.tiles)
    stage = stage_bytes(
        w.bits, w.group_size, w.scales.element_size(), rows, tiles, launch.warps, steps
    )
    stages = min(launch.stages, shared_limit(w.words) // stage)
    if stages < 2:
        raise ValueError(f"{launch} has no room for two stages of {stage} bytes")
    return {
        "K": w.K,
        "G": w.group_size,
        "BITS": w.bits,
        "SCALES": SCALES[w.scales.dtype],
        "R": tiles,
        "C": steps,
        "ROWS": rows,
        "LEAST": min(launch.least, rows),
        "WARPS": launch.warps,
        "PASSES": launch.passes,
        "STAGES": stages,
        "STAGE": stage,
        "SHARED": large_size(stages * stage),
        "num_warps": launch.warps,
        "maxnreg": launch.registers,
        "enable_fp_fusion": True,
    }
