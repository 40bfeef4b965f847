"""experts_gate_up_int8_grouped, experts_down_int8_grouped: blocks of tokens by expert, in INT8.

    act[p] = silu(gate_e @ h_b) * (up_e @ h_b)      p: places in the order of experts
    part[b * slots + s] = down_e @ act[p]           FP32
    y[b] = residual[b] + sum_s share[b, s] * part[b * slots + s]

Layout  codes and scales of the normed x (`quantize`), order and blocks of `experts_lists`, weights
        in tiles of all experts (`tiled_experts`) -> act [P, I] bf16, part [P, h] fp32, y [M, h]
Fused   SwiGLU; norm's factor
Bytes   of the experts that any token has chosen N*K*bits/8 + 2*N*K/G each
Plan    a program takes some tiles for a block of pairs of one expert, whose tokens it brings to
        shared memory once. A warp multiplies a tile over the whole of K (`multiply`), blocks of few
        tokens in a shorter loop. Of few rows act is rounded by the programs of down, of many by a
        kernel of its own. Shares join in the order of the slots (`experts_weigh`). So a token has
        the bits that it has alone, in steps and in prompts
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.experts.int8.lists import experts_lists
from lowbit.runtime.kernels.experts.int8.multiply import (
    Int8Rows,
    codes_address,
    expert_tile,
    int8_rows,
    load_tile,
    multiply_tile,
    scales_address,
)
from lowbit.runtime.kernels.experts.int8.stage import copy_rows, leave_bounds, round_rows
from lowbit.runtime.kernels.experts.route import Routes
from lowbit.runtime.kernels.experts.tiled import stacked
from lowbit.runtime.kernels.experts.weigh import weighed
from lowbit.runtime.kernels.launch.device import programmatic_launch, register_cap, run
from lowbit.runtime.kernels.launch.experts import (
    INT8_BLOCKS,
    INT8_LOOPS,
    ExpertsInt8Launch,
    int8_block_rows,
    int8_grouped_launches,
)
from lowbit.runtime.kernels.linear.gemm_store import swiglu
from lowbit.runtime.kernels.linear.program import Blocks, Packed, token_blocks
from lowbit.runtime.kernels.linear.quantize import bound_at, factor_at, quantize
from lowbit.runtime.kernels.linear.tiles import GpuLinear
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    commit_copies,
    copy4,
    large_size,
    load_shared4,
    recomputed,
    shared_memory,
    store_shared4,
)
from lowbit.runtime.kernels.ptx.mma import as_float, as_word, threads
from lowbit.runtime.weights.linear import ExpertWeights

ROWS_ROUNDED = 16  # of a block, up to which programs of down round act themselves


@dataclass(frozen=True, slots=True, eq=False)
class GroupedPlan:
    """Constants of a program for a block of tokens; made once."""

    W: Packed  # weight of an expert
    B: Int8Rows  # places of the tokens
    X: Blocks | None  # of them in global memory; None where the program rounds them
    LAUNCH: ExpertsInt8Launch  # share of the program
    LOOPS: tuple[int, ...]  # eights of tokens of the loops, the shortest first
    NUMBERS: int  # bytes before the numbers of the rows in global memory
    PAIRS: int  # bytes before token * slots + slot of the rows
    FACTORS: int  # bytes before the factors of the norm
    BOUNDS: int  # bytes before the bounds of the tokens
    SHARED: int  # bytes of shared memory
    PDL: bool  # whether the kernel takes part in programmatic launch


@gluon.constexpr_function
def _eights(plan, i):
    """Eights of tokens of the i-th loop; none for -1."""
    return plan.LOOPS[i] if i >= 0 else 0


@gluon.jit(do_not_specialize=["inner", "tiles", "given_blocks", "slots"])
def _experts_gate_up_int8_grouped_kernel(
    given_ptr, order_ptr, blocks_ptr, words_ptr, scales_ptr, bounds_ptr, act_ptr, inner, tiles,
    given_blocks, slots, PLAN: gl.constexpr,
):  # fmt: skip
    B: gl.constexpr = PLAN.B
    X: gl.constexpr = PLAN.X
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    warp, lane, zero, _ = threads(WARPS)
    buffer = shared_memory(PLAN.SHARED, WARPS, tiles < 0) + zero
    if PLAN.PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = blocks_ptr + gl.program_id(1) * 3
    first = gl.load(block + 1)
    end = gl.load(block + 2)
    if first < end:
        weights = (words_ptr, scales_ptr, bounds_ptr), gl.load(block) * tiles
        at, loaded = _first_tile(weights, tiles, warp, lane, zero, PLAN)
        thread = warp * 32 + lane
        row = gl.minimum(thread, B.ROWS - 1)
        token = gl.load(order_ptr + gl.minimum(first + row, end - 1)) // slots
        store_shared4(buffer + PLAN.NUMBERS + row * 4, as_float(token), thread < B.ROWS)
        factor = factor_at(given_ptr, given_blocks, token, X).to(gl.int64, bitcast=True)
        copy4(buffer + PLAN.FACTORS + row * 4, factor)
        bound = bound_at(given_ptr, given_blocks, token, X).to(gl.int64, bitcast=True)
        copy4(buffer + PLAN.BOUNDS + row * 4, bound)
        commit_copies()
        barrier()
        copy_rows(
            given_ptr, given_blocks, buffer + PLAN.NUMBERS, end - first, buffer, thread, zero,
            WARPS, B, X,
        )  # fmt: skip
        for i in gl.static_range(len(PLAN.LOOPS)):
            if (end - first > _eights(PLAN, i - 1) * 8) & (end - first <= _eights(PLAN, i) * 8):
                _gate_up(
                    loaded, at, weights, act_ptr, inner, tiles, buffer, first, end, warp, lane,
                    zero, _eights(PLAN, i), PLAN,
                )  # fmt: skip


@gluon.jit
def _first_tile(weights, tiles, warp, lane, zero, PLAN: gl.constexpr):
    """Addresses of a warp's first tile, and what has been loaded of it."""
    B: gl.constexpr = PLAN.B
    at = _tile_at(weights, tiles, gl.program_id(0) * _share(PLAN) + warp, lane, zero, PLAN)
    return at, load_tile(at, zero, B)


@gluon.constexpr_function
def _share(plan):
    """Tiles of a program."""
    return plan.LAUNCH.warps * plan.LAUNCH.rounds


@gluon.jit
def _tile_at(weights, tiles, tile, lane, zero, PLAN: gl.constexpr):
    """Addresses of a tile of the block's expert; of its last one past the end."""
    W: gl.constexpr = PLAN.W
    pointers, first = weights
    return expert_tile(pointers, first, tiles, tile, lane, zero, W)


@gluon.jit
def _staged(buffer, lane, zero, PLAN: gl.constexpr):
    """Addresses of the block's codes, scales and bounds; see `multiply_tile`."""
    B: gl.constexpr = PLAN.B
    bounds = buffer + PLAN.BOUNDS + lane % 4 * 8
    return codes_address(buffer, zero, lane, B), scales_address(buffer, zero, lane, B), bounds


@gluon.jit
def _rounds_of(tiles, PLAN: gl.constexpr):
    """Tiles that each warp of this program takes, one after the other."""
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    left = tiles - gl.program_id(0) * _share(PLAN)
    return gl.minimum((left + (WARPS - 1)) // WARPS, PLAN.LAUNCH.rounds)


@gluon.jit
def _gate_up(
    loaded, at, weights, act_ptr, inner, tiles, buffer, first, end, warp, lane, zero,
    NB: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """A program's tiles of gate and up for up to NB times 8 tokens."""
    B: gl.constexpr = PLAN.B
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    staged = _staged(buffer, lane, zero, PLAN)
    rounds = _rounds_of(tiles, PLAN)
    for turn in range(0, rounds):
        tile = gl.program_id(0) * _share(PLAN) + turn * WARPS + warp
        next_tile = tile + gl.where(turn + 1 < rounds, WARPS, 0)
        next_at = _tile_at(weights, tiles, next_tile, lane, zero, PLAN)
        acc, loaded = multiply_tile(loaded, at, next_at, staged, zero, NB, True, B)
        at = next_at
        own = recomputed(lane)
        n = tile * 8 + own // 4
        for nb in gl.static_range(NB):
            for e in gl.static_range(2):
                row = nb * 8 + own % 4 * 2 + e
                factor = load_shared4(buffer + PLAN.FACTORS + row * 4)
                act = swiglu(acc[nb][e] * factor, acc[nb][2 + e] * factor)
                to = act_ptr + ((first + row).to(gl.int64) * inner + n)
                stored = (first + row < end) & (n < inner)
                gl.store(to, act.to(act_ptr.dtype.element_ty), mask=stored)


@gluon.jit(do_not_specialize=["N", "tiles", "given_blocks"])
def _experts_down_int8_grouped_kernel(
    act_ptr, order_ptr, blocks_ptr, words_ptr, scales_ptr, bounds_ptr, part_ptr, N, tiles,
    given_blocks, PLAN: gl.constexpr,
):  # fmt: skip
    """act_ptr: rows in BF16, or the blocks that `quantize` has made of them."""
    B: gl.constexpr = PLAN.B
    X: gl.constexpr = PLAN.X
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = shared_memory(PLAN.SHARED, WARPS, tiles < 0) + zero
    # A kernel before gate and up has left the blocks: where this one runs, all programs of gate and
    # up have waited for it.
    block = blocks_ptr + gl.program_id(1) * 3
    first = gl.load(block + 1)
    end = gl.load(block + 2)
    if first < end:
        weights = (words_ptr, scales_ptr, bounds_ptr), gl.load(block) * tiles
        at, loaded = _first_tile(weights, tiles, warp, lane, zero, PLAN)
        thread = warp * 32 + lane
        row = gl.minimum(thread, B.ROWS - 1)
        place = gl.minimum(first + row, end - 1)
        pair = gl.load(order_ptr + place)
        store_shared4(buffer + PLAN.PAIRS + row * 4, as_float(pair), thread < B.ROWS)
        if PLAN.PDL:
            gdc_wait()
            gdc_launch_dependents()
        if X is None:
            rows = act_ptr.to(gl.int64, bitcast=True) + (first + zero).to(gl.int64) * (2 * B.K)
            round_rows(rows, end - first, buffer, warp, lane, zero_f32, WARPS, B)
            barrier()
            leave_bounds(buffer + PLAN.BOUNDS, buffer, warp, lane, WARPS, B)
        else:
            bound = bound_at(act_ptr, given_blocks, place, X).to(gl.int64, bitcast=True)
            copy4(buffer + PLAN.BOUNDS + row * 4, bound)
            store_shared4(buffer + PLAN.NUMBERS + row * 4, as_float(place), thread < B.ROWS)
            barrier()
            copy_rows(
                act_ptr, given_blocks, buffer + PLAN.NUMBERS, end - first, buffer, thread, zero,
                WARPS, B, X,
            )  # fmt: skip
        for i in gl.static_range(len(PLAN.LOOPS)):
            if (end - first > _eights(PLAN, i - 1) * 8) & (end - first <= _eights(PLAN, i) * 8):
                _down(
                    loaded, at, weights, part_ptr, N, tiles, buffer, end - first, warp, lane, zero,
                    _eights(PLAN, i), PLAN,
                )  # fmt: skip


@gluon.jit
def _down(
    loaded, at, weights, part_ptr, N, tiles, buffer, rows, warp, lane, zero,
    NB: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """A program's tiles of down for up to NB times 8 rows."""
    B: gl.constexpr = PLAN.B
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    staged = _staged(buffer, lane, zero, PLAN)
    rounds = _rounds_of(tiles, PLAN)
    for turn in range(0, rounds):
        tile = gl.program_id(0) * _share(PLAN) + turn * WARPS + warp
        next_tile = tile + gl.where(turn + 1 < rounds, WARPS, 0)
        next_at = _tile_at(weights, tiles, next_tile, lane, zero, PLAN)
        acc, loaded = multiply_tile(loaded, at, next_at, staged, zero, NB, True, B)
        at = next_at
        own = recomputed(lane)
        for nb in gl.static_range(NB):
            for e in gl.static_range(2):
                row = nb * 8 + own % 4 * 2 + e
                pair = as_word(load_shared4(buffer + PLAN.PAIRS + row * 4))
                to = part_ptr + (pair.to(gl.int64) * N + (tile * 16 + own // 4))
                for half in gl.static_range(2):
                    stored = (row < rows) & (tile * 16 + half * 8 + own // 4 < N)
                    gl.store(to + half * 8, acc[nb][2 * half + e], mask=stored)


def block_rows(pairs: int, experts: ExpertWeights[GpuLinear], limit: int) -> int:
    """Tokens of a block, one of INT8_BLOCKS; 0 where no 8 of them have room.

    Args:
        pairs: of token and expert.
        limit: bytes of shared memory of a program.
    """
    both = stacked(experts.gate_up).constants, stacked(experts.down).constants
    most = int8_block_rows(pairs, len(experts.gate_up))
    fit = (n for n in INT8_BLOCKS if n <= most and max(_bytes(W, n) for W in both) <= limit)
    return max(fit, default=0)


def experts_grouped_int8(
    x: Tensor,
    norm: Tensor,
    eps: float,
    routes: Routes,
    experts: ExpertWeights[GpuLinear],
    rows: int,
    residual: Tensor,
) -> Tensor:
    """Add to a residual the weighted outputs of every token's experts for the normed token.

    Args:
        x: [M, h] bfloat16, contiguous.
        norm: [h] gain of the RMS norm.
        routes: of `experts_route`.
        experts: of `gathered`.
        rows: of a block; see `block_rows`.
        residual: [M, h].

    Returns:
        [M, h] in the residual's dtype; a token has the bits of `gate_up_int8` and `down_int8`.
    """
    gate_up, down = stacked(experts.gate_up), stacked(experts.down)
    (M, h), inner, slots = x.shape, gate_up.N // 2, routes.numbers.shape[1]
    pairs, pdl = M * slots, programmatic_launch(x)
    gate_up_launch, down_launch = int8_grouped_launches(rows)
    plan = _plan(gate_up.constants, gate_up_launch, rows, True, pdl)
    places = _blocks(gate_up.constants)
    given = quantize(x, gate_up.bits, places, norm=norm, eps=eps, early=False)
    order, blocks = experts_lists(routes.numbers, gate_up.words, rows)  # beside `quantize`
    act = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    run(
        _experts_gate_up_int8_grouped_kernel,
        (-(-gate_up.tiles // (gate_up_launch.warps * gate_up_launch.rounds)), len(blocks)),
        given,
        order,
        blocks,
        gate_up.words,
        gate_up.scales.view(torch.int32),
        gate_up.bounds,
        act,
        inner,
        gate_up.tiles,
        -(-M // 8),
        slots,
        PLAN=plan,
        num_warps=gate_up_launch.warps,
        maxnreg=register_cap(x, gate_up_launch.registers),
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    copied = rows > ROWS_ROUNDED
    parts = torch.empty((pairs, h), dtype=torch.float32, device=x.device)
    run(
        _experts_down_int8_grouped_kernel,
        (-(-down.tiles // (down_launch.warps * down_launch.rounds)), len(blocks)),
        quantize(act, down.bits, _blocks(down.constants)) if copied else act,
        order,
        blocks,
        down.words,
        down.scales.view(torch.int32),
        down.bounds,
        parts,
        h,
        down.tiles,
        -(-pairs // 8),
        PLAN=_plan(down.constants, down_launch, rows, copied, pdl),
        num_warps=down_launch.warps,
        maxnreg=register_cap(x, down_launch.registers),
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return weighed(parts, routes.shares, residual)


def _bytes(W: Packed, rows: int) -> int:
    """Shared memory of a program: tokens, and four words of each."""
    return large_size(int8_rows(W, rows, rows, 1).END + 4 * rows * 4)


@cache
def _blocks(W: Packed) -> Blocks:
    """Places of a linear's input in global memory."""
    return token_blocks(W.K, int8_rows(W, 8, 8, 1).GROUP, 8)


@cache
def _plan(W: Packed, launch: ExpertsInt8Launch, rows: int, copied: bool, pdl: bool) -> GroupedPlan:
    B = int8_rows(W, rows, rows, launch.kilobytes)
    numbers, pairs, factors, bounds = (B.END + i * rows * 4 for i in range(4))
    return GroupedPlan(
        B.W,
        B,
        X=_blocks(W) if copied else None,
        LAUNCH=launch,
        LOOPS=INT8_LOOPS[rows],
        NUMBERS=numbers,
        PAIRS=pairs,
        FACTORS=factors,
        BOUNDS=bounds,
        SHARED=_bytes(W, rows),
        PDL=pdl,
    )
