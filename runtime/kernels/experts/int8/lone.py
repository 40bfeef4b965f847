"""experts_gate_up_int8, experts_down_int8: experts of few tokens, each for itself, x in eight bits.

    act[b, s] = silu(gate_e @ h) * (up_e @ h)           e = expert s of token b
    y[b] = residual[b] + sum_s share[b, s] * down_e @ act[b, s]

Layout  x [M, h] bf16, scores [M, experts] fp32 of a lone token or numbers and shares of
        `experts_route`, weights in tiles of all experts (`tiled_experts`) -> act [M, slots, I] bf16
        -> y [M, h] in the residual's type
Fused   RMS norm of x; of a lone token the choice of experts and their shares; SwiGLU; residual
Bytes   of the experts that are chosen N*K*bits/8 + 2*N*K/G each
Plan    as of `experts_gate_up` and `experts_down`, but a warp multiplies a tile over the whole of
        K (`multiply`): of gate and up for the expert of its program, of down for one slot of the
        token. Programs round x and act themselves. Shares join in the order of the slots
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.experts.choice import expert_of, likeliest, scores_of, shares
from lowbit.runtime.kernels.experts.int8.multiply import (
    Int8Rows,
    codes_address,
    expert_tile,
    int8_rows,
    load_tile,
    multiply_tile,
    scales_address,
)
from lowbit.runtime.kernels.experts.int8.stage import bound_of, round_rows, round_token
from lowbit.runtime.kernels.experts.program import Choice, choice_of
from lowbit.runtime.kernels.experts.route import Routes
from lowbit.runtime.kernels.experts.tiled import stacked
from lowbit.runtime.kernels.launch.device import programmatic_launch, register_cap, run
from lowbit.runtime.kernels.launch.experts import (
    ExpertsInt8Launch,
    int8_down_launch,
    int8_gate_up_launch,
)
from lowbit.runtime.kernels.linear.gemm_store import swiglu
from lowbit.runtime.kernels.linear.norm import load_gains, norm_factor, total_of
from lowbit.runtime.kernels.linear.program import SQUARES_BYTES, Packed, turns_of
from lowbit.runtime.kernels.linear.sums import store_result
from lowbit.runtime.kernels.linear.tiles import GpuLinear
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    load4_l2,
    load_shared8,
    shared_memory,
    store_shared8,
)
from lowbit.runtime.kernels.ptx.mma import as_float, as_word, threads
from lowbit.runtime.weights.linear import ExpertWeights

SUM_BYTES = gl.constexpr(64)  # of the 16 rows of a tile


@dataclass(frozen=True, slots=True, eq=False)
class LonePlan:
    """Constants of a program; made once."""

    CHOICE: Choice  # of experts
    W: Packed  # weight of an expert
    B: Int8Rows  # places of the tokens
    LAUNCH: ExpertsInt8Launch  # share of the program
    SUMS: int  # bytes before sums: of squares, or of all slots
    SHARED: int  # bytes of shared memory
    PDL: bool  # whether the kernel takes part in programmatic launch


@gluon.jit(do_not_specialize=["inner", "tiles"])
def _experts_gate_up_int8_kernel(
    x_ptr, gain_ptr, scores_ptr, numbers_ptr, words_ptr, scales_ptr, bounds_ptr, act_ptr, inner,
    tiles, eps, PLAN: gl.constexpr,
):  # fmt: skip
    CHOICE: gl.constexpr = PLAN.CHOICE
    B: gl.constexpr = PLAN.B
    W: gl.constexpr = PLAN.W
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    ROUNDS: gl.constexpr = PLAN.LAUNCH.rounds
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = shared_memory(PLAN.SHARED, WARPS, tiles < 0) + zero
    token = gl.program_id(1) // CHOICE.SLOTS
    slot = gl.program_id(1) % CHOICE.SLOTS
    first_tile = gl.program_id(0) * (WARPS * ROUNDS) + warp
    gains = load_gains(gain_ptr, warp, lane, turns_of(B.BLOCKS, WARPS), WARPS, B)
    if PLAN.PDL:
        gdc_wait()
        gdc_launch_dependents()
    if numbers_ptr is not None:
        expert = gl.load(numbers_ptr + gl.program_id(1)) + zero
    else:
        numbers, _ = likeliest(scores_of(scores_ptr, token, zero, CHOICE), lane, CHOICE)
        expert = expert_of(slot + zero, numbers, CHOICE)
    weights = words_ptr, scales_ptr, bounds_ptr
    begin = expert * tiles
    at = expert_tile(weights, begin, tiles, first_tile, lane, zero, W)
    loaded = load_tile(at, zero, B)
    x = x_ptr.to(gl.int64, bitcast=True) + (token + zero).to(gl.int64) * (2 * B.K)
    round_token(x, gains, buffer, buffer + PLAN.SUMS, warp, lane, zero_f32, WARPS, B)
    barrier()
    factor = norm_factor(total_of(buffer + PLAN.SUMS, lane, zero_f32, B), eps, B.K)
    bound = bound_of(buffer, zero, lane, B)
    staged = codes_address(buffer, zero, lane, B), scales_address(buffer, zero, lane, B), bound
    out = act_ptr + gl.program_id(1).to(gl.int64) * inner
    for turn in gl.static_range(ROUNDS):
        next_tile = first_tile + (turn + 1) * WARPS
        next_at = expert_tile(weights, begin, tiles, next_tile, lane, zero, W)
        acc, loaded = multiply_tile(loaded, at, next_at, staged, zero, 1, turn + 1 < ROUNDS, B)
        at = next_at
        y = acc[0]
        n = (first_tile + turn * WARPS) * 8 + lane // 4
        act = swiglu(y[0] * factor, y[2] * factor)
        stored = (lane % 4 == 0) & (n < inner)
        gl.store(out + n, act.to(act_ptr.dtype.element_ty), mask=stored)


@gluon.jit(do_not_specialize=["N", "tiles"])
def _experts_down_int8_kernel(
    act_ptr, scores_ptr, numbers_ptr, shares_ptr, words_ptr, scales_ptr, bounds_ptr, added_ptr,
    y_ptr, N, tiles, PLAN: gl.constexpr,
):  # fmt: skip
    """A unit of work is a tile of a round and a slot, and units go round the warps."""
    CHOICE: gl.constexpr = PLAN.CHOICE
    B: gl.constexpr = PLAN.B
    W: gl.constexpr = PLAN.W
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    TILES: gl.constexpr = PLAN.LAUNCH.tiles
    ROUNDS: gl.constexpr = PLAN.LAUNCH.rounds
    SLOTS: gl.constexpr = CHOICE.SLOTS
    UNITS: gl.constexpr = TILES * SLOTS
    OWN: gl.constexpr = (UNITS + WARPS - 1) // WARPS
    ITEMS: gl.constexpr = ROUNDS * TILES
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = shared_memory(PLAN.SHARED, WARPS, tiles < 0) + zero
    g = lane // 4
    t = lane % 4
    token = gl.program_id(1)
    first_tile = gl.program_id(0) * ITEMS
    numbers = ()
    if numbers_ptr is not None:
        numbers_at = (
            numbers_ptr.to(gl.int64, bitcast=True) + (token * SLOTS + zero).to(gl.int64) * 4
        )
    else:  # which a kernel before the last one has left: see `experts_down`
        scores = scores_of(scores_ptr, token, zero, CHOICE)
        numbers, found = likeliest(scores, lane, CHOICE)
    weights = words_ptr, scales_ptr, bounds_ptr
    experts = ()
    places = ()
    loaded = ()
    for turn in gl.static_range(OWN):
        unit = gl.minimum(turn * WARPS + warp, UNITS - 1)
        if numbers_ptr is not None:
            expert = load4_l2(numbers_at + (unit % SLOTS).to(gl.int64) * 4)
        else:
            expert = expert_of(unit % SLOTS, numbers, CHOICE)
        tile = first_tile + unit // SLOTS
        at = expert_tile(weights, expert * tiles, tiles, tile, lane, zero, W)
        experts = experts + (expert,)
        places = places + (at,)
        loaded = loaded + (load_tile(at, zero, B),)
    share = ()
    if numbers_ptr is not None:
        shares_at = shares_ptr.to(gl.int64, bitcast=True) + (token * SLOTS + zero).to(gl.int64) * 4
        for slot in gl.static_range(SLOTS):
            share = share + (as_float(load4_l2(shares_at + slot * 4)),)
    else:
        share = shares(scores, found, lane, CHOICE)
    if PLAN.PDL:
        gdc_wait()
        gdc_launch_dependents()
    added = ()
    for first in gl.static_range(0, ITEMS, WARPS):
        tile = first_tile + gl.minimum(first + warp, ITEMS - 1)
        for half in gl.static_range(2):
            n = gl.minimum(tile * 16 + half * 8 + g, N - 1)
            added = added + (gl.load(added_ptr + token.to(gl.int64) * N + n).to(gl.float32),)
    act = act_ptr.to(gl.int64, bitcast=True) + (token * SLOTS + zero).to(gl.int64) * (2 * B.K)
    round_rows(act, SLOTS, buffer, warp, lane, zero_f32, WARPS, B)
    barrier()
    bounds = ()
    for i in gl.static_range(OWN):
        slot = gl.minimum(i * WARPS + warp, UNITS - 1) % SLOTS
        bounds = bounds + (bound_of(buffer, slot, lane, B),)
    sums_at = buffer + PLAN.SUMS
    for turn in gl.static_range(ROUNDS):
        next_places = ()
        next_loaded = ()
        for i in gl.static_range(OWN):
            unit = i * WARPS + warp
            own = gl.minimum(unit, UNITS - 1)
            slot = own % SLOTS
            tile = first_tile + (turn + 1) * TILES + own // SLOTS
            begin = experts[i] * tiles
            next_at = expert_tile(weights, begin, tiles, tile, lane, zero, W)
            codes_at = codes_address(buffer, slot, lane, B)
            staged = codes_at, scales_address(buffer, slot, lane, B), bounds[i]
            acc, following = multiply_tile(
                loaded[i], places[i], next_at, staged, zero, 1, turn + 1 < ROUNDS, B
            )
            next_places = next_places + (next_at,)
            next_loaded = next_loaded + (following,)
            y = acc[0]
            store_shared8(
                sums_at + (turn * UNITS + unit) * SUM_BYTES + g * 8, (as_word(y[0]), as_word(y[2])),
                (t == 0) & (unit < UNITS),
            )  # fmt: skip
        places = next_places
        loaded = next_loaded
    barrier()
    for first in gl.static_range(0, ITEMS, WARPS):
        item = first + warp
        here = sums_at + gl.minimum(item, ITEMS - 1) * (SLOTS * SUM_BYTES) + g * 8
        low = zero_f32
        high = zero_f32
        for slot in gl.static_range(SLOTS):
            pair = load_shared8(here, slot * SUM_BYTES)
            low = gl.fma(share[slot], as_float(pair[0]), low)
            high = gl.fma(share[slot], as_float(pair[1]), high)
        store_result(
            y_ptr, low, high, (added[first // WARPS * 2], added[first // WARPS * 2 + 1]),
            first_tile + item, g, token + zero, (t == 0) & (item < ITEMS), N, False,
        )  # fmt: skip


def gate_up_int8(
    x: Tensor,
    norm: Tensor,
    eps: float,
    scores: Tensor,
    routes: Routes | None,
    experts: ExpertWeights[GpuLinear],
) -> Tensor:
    """SwiGLU of every token by each of its experts: [M, slots, I] in x's dtype.

    Args:
        x: [M, h] bfloat16, contiguous.
        norm: [h] gain of the RMS norm.
        scores: [M, experts] float32, of the router.
        routes: of `experts_route`; None lets every warp choose for itself.
        experts: of `gathered`.
    """
    w, choice, pdl = stacked(experts.gate_up), choice_of(experts), programmatic_launch(x)
    M, inner = x.shape[0], w.N // 2
    launch = int8_gate_up_launch(M)
    act = torch.empty((M, choice.SLOTS, inner), dtype=x.dtype, device=x.device)
    run(
        _experts_gate_up_int8_kernel,
        (-(-w.tiles // (launch.warps * launch.rounds)), M * choice.SLOTS),
        x,
        norm,
        scores,
        None if routes is None else routes.numbers,
        w.words,
        w.scales.view(torch.int32),
        w.bounds,
        act,
        inner,
        w.tiles,
        eps,
        PLAN=_gate_up_plan(choice, w.constants, launch, pdl),
        num_warps=launch.warps,
        maxnreg=register_cap(x, launch.registers),
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return act


def down_int8(
    act: Tensor,
    scores: Tensor,
    routes: Routes | None,
    experts: ExpertWeights[GpuLinear],
    residual: Tensor,
) -> Tensor:
    """Multiply by the down weights of every token's experts, weigh, and add the residual.

    Args:
        act: [M, slots, I], of `gate_up_int8`.
        scores: [M, experts] float32, of the router.
        routes: of `experts_route`; None lets every warp choose for itself.
        experts: of `gathered`.
        residual: [M, N].

    Returns:
        [M, N] in the residual's dtype.
    """
    w, choice, pdl = stacked(experts.down), choice_of(experts), programmatic_launch(act)
    launch = int8_down_launch(w.steps, choice.SLOTS, len(act))
    y = torch.empty_like(residual)
    run(
        _experts_down_int8_kernel,
        (-(-w.tiles // (launch.tiles * launch.rounds)), len(act)),
        act,
        scores,
        None if routes is None else routes.numbers,
        None if routes is None else routes.shares,
        w.words,
        w.scales.view(torch.int32),
        w.bounds,
        residual,
        y,
        w.N,
        w.tiles,
        PLAN=_down_plan(choice, w.constants, launch, pdl),
        num_warps=launch.warps,
        maxnreg=register_cap(act, launch.registers),
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return y


@cache
def _gate_up_plan(choice: Choice, W: Packed, launch: ExpertsInt8Launch, pdl: bool) -> LonePlan:
    B = int8_rows(W, 1, 1, launch.kilobytes)
    return LonePlan(choice, B.W, B, launch, B.END, B.END + B.BLOCKS * SQUARES_BYTES.value, pdl)


@cache
def _down_plan(choice: Choice, W: Packed, launch: ExpertsInt8Launch, pdl: bool) -> LonePlan:
    B = int8_rows(W, choice.SLOTS, 1, launch.kilobytes)
    sums = launch.tiles * launch.rounds * choice.SLOTS * SUM_BYTES.value
    return LonePlan(choice, B.W, B, launch, B.END, B.END + sums, pdl)
