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

from lowbit.runtime.kernels.experts.multiply import (
    Block,
    begin,
    block_of,
    chunk_row,
    multiply,
    shorter,
    tile_of,
)
from lowbit.runtime.kernels.experts.tiled import TiledExperts
from lowbit.runtime.kernels.launch.device import card_of, run
from lowbit.runtime.kernels.launch.experts import GemmLaunch, GemmTiles
from lowbit.runtime.kernels.ptx.memory import large_shared_buffer, recomputed
from lowbit.runtime.kernels.ptx.mma import threads


@gluon.jit(do_not_specialize=["width", "tiles"])
def _experts_gate_up_gemm_kernel(
    h_ptr, order_ptr, blocks_ptr, words_ptr, scales_ptr, act_ptr, width, tiles,
    SLOTS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    _multiply_expert(
        h_ptr, order_ptr, blocks_ptr, None, words_ptr, scales_ptr, act_ptr, width, tiles, SLOTS,
        BLOCK,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["N", "tiles"])
def _experts_down_gemm_kernel(
    act_ptr, order_ptr, blocks_ptr, shares_ptr, words_ptr, scales_ptr, out_ptr, N, tiles,
    BLOCK: gl.constexpr,
):  # fmt: skip
    _multiply_expert(
        act_ptr, order_ptr, blocks_ptr, shares_ptr, words_ptr, scales_ptr, out_ptr, N, tiles, 0,
        BLOCK,
    )  # fmt: skip


@gluon.jit
def _multiply_expert(
    x_ptr, order_ptr, blocks_ptr, shares_ptr, words_ptr, scales_ptr, out_ptr, columns, tiles,
    SLOTS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """A block times its expert: gate and up where there are no shares, else down.

    columns: of the result. SLOTS: pairs of a token, which have one row of x where no shares are.
    """
    LAUNCH: gl.constexpr = BLOCK.LAUNCH
    W: gl.constexpr = BLOCK.W
    SIZE: gl.constexpr = (LAUNCH.stages * BLOCK.STAGE + 1023) // 1024 * 1024
    TILE_BYTES: gl.constexpr = W.STEPS * W.CODEC.STEP_BYTES
    TILE_SCALES: gl.constexpr = W.GROUPS * 32 * BLOCK.PARTS
    warp, lane, zero, zero_f32 = threads(LAUNCH.warps)
    block = blocks_ptr + gl.program_id(1) * 3
    first = gl.load(block + 1)
    end = gl.load(block + 2)
    buffer = large_shared_buffer(tiles < 0, SIZE, LAUNCH.warps) + zero
    if first < end:
        expert = gl.load(block).to(gl.int64) * tiles
        words = words_ptr.to(gl.int64, bitcast=True) + expert * TILE_BYTES + lane * 16
        scales = scales_ptr.to(gl.int64, bitcast=True) + expert * TILE_SCALES
        weights = words, scales + lane // 4 * (4 * BLOCK.PARTS)
        given = x_ptr, order_ptr, shares_ptr, out_ptr
        SHORTER: gl.constexpr = len(BLOCK.SHORTER)
        if end - first > SHORTER * LAUNCH.least:
            _multiply_block(
                given, columns, weights, tiles, buffer, first, end, warp, lane, zero_f32, SLOTS,
                BLOCK,
            )  # fmt: skip
        else:
            for i in gl.static_range(SHORTER):
                if (end - first > i * LAUNCH.least) & (end - first <= (i + 1) * LAUNCH.least):
                    _multiply_block(
                        given, columns, weights, tiles, buffer, first, end, warp, lane, zero_f32,
                        SLOTS, shorter(BLOCK, i),
                    )  # fmt: skip


@gluon.jit
def _multiply_block(
    given, columns, weights, tiles, buffer, first, end, warp, lane, zero_f32,
    SLOTS: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """The places from `first` to `end` times this program's tiles of their expert."""
    x_ptr, order_ptr, shares_ptr, out_ptr = given
    CHUNKS: gl.constexpr = B.STRIDE // 16
    THREADS: gl.constexpr = B.LAUNCH.warps * 32
    thread = warp * 32 + lane
    x = ()
    for i in gl.static_range((B.ROWS * CHUNKS + THREADS - 1) // THREADS):
        row = gl.minimum(first + chunk_row(thread, i, B), end - 1)
        if shares_ptr is None:
            row = gl.load(order_ptr + row) // SLOTS
        at = row.to(gl.int64) * (2 * B.W.K) + thread % CHUNKS * 16
        x = x + (x_ptr.to(gl.int64, bitcast=True) + at,)
    begin(weights, x, buffer, tiles, warp, lane, B)
    read_at = lane * 0
    write_at = lane * 0 + (B.LAUNCH.stages - 1) * B.STAGE
    for turn in range(0, B.LAUNCH.passes * B.TURNS, B.TURNS):
        acc, read_at, write_at = multiply(
            weights, x, buffer, read_at, write_at, turn, tiles, warp, lane, zero_f32, B
        )
        tile = tile_of(turn, tiles, warp, B)
        own = recomputed(lane)
        if shares_ptr is None:
            _store_act(acc, out_ptr, columns, tile, first, end, own, B)
        else:
            _store_out(acc, order_ptr, shares_ptr, out_ptr, columns, tile, first, end, own, B)


@gluon.jit
def _store_act(acc, act_ptr, width, tile, first, end, lane, B: gl.constexpr):
    R: gl.constexpr = B.LAUNCH.tiles
    for i in gl.static_range(B.ROWS // 8):
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
def _store_out(
    acc, order_ptr, shares_ptr, out_ptr, N, tile, first, end, lane, B: gl.constexpr
):  # fmt: skip
    R: gl.constexpr = B.LAUNCH.tiles
    for i in gl.static_range(B.ROWS // 8):
        for e in gl.static_range(2):
            place = first + i * 8 + lane % 4 * 2 + e
            pair = gl.load(order_ptr + gl.minimum(place, end - 1))
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
    act = torch.empty((len(order), w.N // 2), dtype=h.dtype, device=h.device)
    block = _block_for(w, launch.gate_up, launch.rows)
    run(
        _experts_gate_up_gemm_kernel,
        (_programs(w, block.LAUNCH), len(blocks)),
        h,
        order,
        blocks,
        w.words,
        w.scales.view(torch.int32),
        act,
        w.N // 2,
        w.tiles,
        SLOTS=slots,
        **_options(block),
    )
    return act


def down_blocks(
    act: Tensor, order: Tensor, blocks: Tensor, shares: Tensor, w: TiledExperts, launch: GemmLaunch
) -> Tensor:
    """Multiply the act of every pair by down and its share: [P, N] float32, by token and slot."""
    out = torch.empty((len(order), w.N), dtype=torch.float32, device=act.device)
    block = _block_for(w, launch.down, launch.rows)
    run(
        _experts_down_gemm_kernel,
        (_programs(w, block.LAUNCH), len(blocks)),
        act,
        order,
        blocks,
        shares,
        w.words,
        w.scales.view(torch.int32),
        out,
        w.N,
        w.tiles,
        **_options(block),
    )
    return out


def _programs(w: TiledExperts, launch: GemmTiles) -> int:
    """Programs of a block; the last ones share tiles where they do not divide."""
    return -(-w.tiles // (launch.tiles * launch.warps * launch.passes))


def _options(block: Block) -> dict[str, Any]:
    launch = block.LAUNCH
    return {
        "BLOCK": block,
        "num_warps": launch.warps,
        "maxnreg": launch.registers,
        "enable_fp_fusion": True,
    }


def _block_for(w: TiledExperts, launch: GemmTiles, rows: int) -> Block:
    return block_of(w.constants, launch, w.tiles, rows, card_of(w.words).shared_bytes)
