"""experts_down: y[b] = x[b] + sum_s share[b, s] * down_e @ act[b, s], e = expert s of token b.

Layout  act [M, slots, width] bf16 of `experts_gate_up`, scores [M, experts] fp32 of a lone token or
        numbers and shares of `experts_route`, weights in tiles of all experts (`tiled_experts`),
        x [M, N] bf16 -> y [M, N]
Fused   of a lone token the choice of experts, softmax over those that are chosen and sigmoid of the
        shared one's gate; residual
Bytes   of the experts that are chosen N*K*bits/8 + 2*N*K/G each
Plan    a program takes some tiles of rows for one token, in rounds of which the next one's weights
        are on their way. A unit of work is one step of one expert, and units go round the warps.
        An expert's steps are summed in order, then its share joins those of the experts before it,
        the likeliest first and the shared one last, then the residual, in FP32, and is rounded
        once. Where `ahead`, warps know the experts and ask for weights before they wait: scores and
        routes are those of the kernel before the last or older, which has ended, as
        `experts_gate_up` lets this kernel start after it has waited itself
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.codec import CODECS
from lowbit.runtime.kernels.experts.choice import expert_of, likeliest, scores_of, shares
from lowbit.runtime.kernels.experts.program import (
    Choice,
    ExpertsPlan,
    choice_of,
    padded_width,
)
from lowbit.runtime.kernels.experts.route import Routes
from lowbit.runtime.kernels.experts.tiled import stacked
from lowbit.runtime.kernels.launch.device import programmatic_launch, register_cap, run
from lowbit.runtime.kernels.launch.experts import (
    ExpertsDownLaunch,
    experts_down_launch,
    experts_down_launches,
)
from lowbit.runtime.kernels.linear.digits import stage_tokens
from lowbit.runtime.kernels.linear.products import (
    column_of,
    load_steps,
    multiply_steps,
    tile_addresses,
    unit_of,
    zero_sums,
)
from lowbit.runtime.kernels.linear.program import BLOCK_K, Packed, staged_digits
from lowbit.runtime.kernels.linear.sums import store_result, store_sums, sum_of_parts
from lowbit.runtime.kernels.linear.tiles import TILE, GpuLinear
from lowbit.runtime.kernels.ptx.memory import barrier, load4_l2, shared_memory
from lowbit.runtime.kernels.ptx.mma import as_float, threads
from lowbit.runtime.weights.linear import ExpertWeights

SUM_BYTES = gl.constexpr(64)  # of 16 rows


@gluon.jit(do_not_specialize=["N", "tiles"])
def _experts_down_kernel(
    act_ptr, scores_ptr, numbers_ptr, shares_ptr, words_ptr, scales_ptr, added_ptr, y_ptr, N, tiles,
    PLAN: gl.constexpr,
):  # fmt: skip
    CHOICE: gl.constexpr = PLAN.CHOICE
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    R: gl.constexpr = PLAN.LAUNCH.tiles  # of a round
    ROUNDS: gl.constexpr = PLAN.LAUNCH.rounds
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    SLOTS: gl.constexpr = CHOICE.SLOTS
    STEPS: gl.constexpr = W.STEPS
    UNITS: gl.constexpr = SLOTS * STEPS
    OWN: gl.constexpr = (UNITS + WARPS - 1) // WARPS
    ITEMS: gl.constexpr = ROUNDS * R
    if PLAN.PDL and PLAN.LAUNCH.early:
        gdc_launch_dependents()
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = shared_memory(PLAN.SHARED, WARPS, N < 0) + zero
    g = lane // 4
    t = lane % 4
    token = gl.program_id(1)
    first_tile = gl.program_id(0) * ITEMS
    if PLAN.PDL and not PLAN.LAUNCH.ahead:
        gdc_wait()
    numbers = ()
    if numbers_ptr is not None:
        numbers_at = _address(numbers_ptr + token * SLOTS, zero)
    else:
        scores = scores_of(scores_ptr, token, zero, CHOICE)
        numbers, found = likeliest(scores, lane, CHOICE)
    experts = ()
    loaded = ()
    for turn in gl.static_range(OWN):
        unit = gl.minimum(turn * WARPS + warp, UNITS - 1)
        if numbers_ptr is not None:
            expert = load4_l2(numbers_at + (unit // STEPS).to(gl.int64) * 4)
        else:
            expert = expert_of(unit // STEPS, numbers, CHOICE)
        experts = experts + (expert,)
        loaded = loaded + (
            _load_unit(
                words_ptr, scales_ptr, expert, tiles, first_tile, unit % STEPS, lane, R, W
            ),
        )  # fmt: skip
    if numbers_ptr is not None:
        share = ()
        for slot in gl.static_range(SLOTS):
            share = share + (as_float(load4_l2(_address(shares_ptr + token * SLOTS + slot, zero))),)
    else:
        share = shares(scores, found, lane, CHOICE)
    if PLAN.PDL:
        if PLAN.LAUNCH.ahead:
            gdc_wait()
        if not PLAN.LAUNCH.early:
            gdc_launch_dependents()
    added = ()
    for first in gl.static_range(0, ITEMS, WARPS):
        tile = first_tile + gl.minimum(first + warp, ITEMS - 1)
        for half in gl.static_range(2):
            n = gl.minimum(tile * 16 + half * 8 + g, N - 1)
            added = added + (gl.load(added_ptr + token.to(gl.int64) * N + n).to(gl.float32),)
    stage_tokens(
        act_ptr + token.to(gl.int64) * (SLOTS * PLAN.WIDTH), (), (), None, buffer, warp, lane,
        zero_f32, 1, 0.0, 0, W.CODEC.SUBBYTE, WARPS, X,
    )  # fmt: skip
    barrier()
    sums_at = buffer + PLAN.SUMS
    for turn in gl.static_range(ROUNDS):
        next_loaded = ()
        for i in gl.static_range(OWN):
            unit = i * WARPS + warp
            own_unit = gl.minimum(unit, UNITS - 1)
            if turn + 1 < ROUNDS:
                next_loaded = next_loaded + (
                    _load_unit(
                        words_ptr, scales_ptr, experts[i], tiles, first_tile + (turn + 1) * R,
                        own_unit % STEPS, lane, R, W,
                    ),
                )  # fmt: skip
            _multiply_unit(
                loaded[i], buffer, own_unit, lane, zero_f32,
                sums_at + turn * (R * UNITS * SUM_BYTES) + (unit * 8 + g) * 8,
                (t == 0) & (unit < UNITS), PLAN,
            )  # fmt: skip
        loaded = next_loaded
    barrier()
    factor = zero_f32 + W.CODEC.FACTOR
    for first in gl.static_range(0, ITEMS, WARPS):
        item = first + warp
        at = sums_at + (gl.minimum(item, ITEMS - 1) * (UNITS * 8) + g) * 8
        low = zero_f32
        high = zero_f32
        for slot in gl.static_range(SLOTS):
            y = sum_of_parts(at + slot * (STEPS * SUM_BYTES), STEPS, 8, 1)
            low = gl.fma(share[slot], y[0], low)
            high = gl.fma(share[slot], y[1], high)
        store_result(
            y_ptr, low * factor, high * factor,
            (added[first // WARPS * 2], added[first // WARPS * 2 + 1]), first_tile + item, g,
            token + zero, (t == 0) & (item < ITEMS), N, False,
        )  # fmt: skip


@gluon.jit
def _load_unit(
    words_ptr, scales_ptr, expert, tiles, tile, step, lane, R: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Words and raw scales of one step of an expert, of R tiles; past the last its again."""
    at = tile_addresses(
        words_ptr, scales_ptr, expert * tiles + tile, (expert + 1) * tiles, step, lane, R, W
    )
    STEPS: gl.constexpr = W.STEPS
    return load_steps(at, step, 0, 1, STEPS, W)


@gluon.jit
def _address(pointer, zero):
    return pointer.to(gl.int64, bitcast=True) + zero


@gluon.jit
def _multiply_unit(
    loaded, buffer, unit, lane, zero_f32, sums_at, held,
    PLAN: gl.constexpr,
):  # fmt: skip
    """One step of one expert times its slot, for all tiles; leaves their sums side by side."""
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    R: gl.constexpr = PLAN.LAUNCH.tiles
    STEPS: gl.constexpr = W.STEPS
    TILE_BYTES: gl.constexpr = PLAN.CHOICE.SLOTS * W.STEPS * SUM_BYTES
    slot = unit // STEPS
    step = unit % STEPS
    digits = buffer + column_of(lane, X)
    digits += slot * PLAN.WIDTH + step * (W.CODEC.BLOCKS * 64)  # 64 k are 64 bytes of a plane
    units = buffer + X.UNITS + slot * (PLAN.WIDTH // BLOCK_K * 4) + unit_of(lane, 1)
    mixed = gl.where(lane % 2 == 0, 256, 0)
    acc = multiply_steps(
        zero_sums(zero_f32, R, 1), loaded, digits, units, step, mixed, 0, 1, STEPS, W, X
    )
    for r in gl.static_range(R):
        store_sums(acc[r], sums_at + r * TILE_BYTES, held, True)


def experts_down(
    act: Tensor,
    scores: Tensor,
    routes: Routes | None,
    experts: ExpertWeights[GpuLinear],
    x: Tensor,
) -> Tensor:
    """Multiply by the down weights of every token's experts, weigh, and add the residual.

    Args:
        act: [M, slots, width], of `experts_gate_up`.
        scores: [M, experts] float32, of the router.
        routes: of `experts_route`; None lets every warp choose for itself.
        experts: of `gathered`.
        x: [M, N], the residual.

    Returns:
        [M, N] in x's dtype.
    """
    M, w = x.shape[0], stacked(experts.down)
    launch = experts_down_launch(w.bits, w.tiles, w.steps, M)
    pdl = programmatic_launch(x)
    y = torch.empty_like(x)
    run(
        _experts_down_kernel,
        (-(-w.tiles // (launch.tiles * launch.rounds)), M),
        act,
        scores,
        None if routes is None else routes.numbers,
        None if routes is None else routes.shares,
        w.words,
        w.scales.view(torch.int32),
        x,
        y,
        w.N,
        w.tiles,
        PLAN=_plan(choice_of(experts), w.constants, launch, pdl),
        num_warps=launch.warps,
        maxnreg=register_cap(x, launch.registers),
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return y


@cache
def _plan(choice: Choice, W: Packed, launch: ExpertsDownLaunch, pdl: bool) -> ExpertsPlan:
    width = padded_width(W.K)
    X = staged_digits(choice.SLOTS * width)
    return ExpertsPlan(
        choice,
        W,
        X,
        LAUNCH=launch,
        INNER=W.K,
        WIDTH=width,
        SUMS=X.SQUARES,
        SHARED=max(launch.shared << 10 if pdl else 0, _needed(W.K, choice.SLOTS, W.STEPS, launch)),
        PDL=pdl,
    )


def experts_down_bytes(bits: int, inner: int, hidden: int, slots: int) -> int:
    """The most shared memory of a program, for any number of tokens."""
    tiles, steps = -(-hidden // TILE), -(-inner // CODECS[bits].STEP_K)
    launches = experts_down_launches(bits, tiles, steps)
    return max(_needed(inner, slots, steps, launch) for launch in launches)


def _needed(inner: int, slots: int, steps: int, launch: ExpertsDownLaunch) -> int:
    """Shared memory of a program: digits of all slots, and sums of all units."""
    sums = launch.tiles * launch.rounds * slots * steps * 64
    return staged_digits(slots * padded_width(inner)).SQUARES + sums
