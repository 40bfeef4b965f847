"""experts_gate_up: act[b, s] = silu(gate_e @ h) * (up_e @ h), e = expert s of token b.

Layout  x [M, K] bf16, scores [M, experts] fp32 of a lone token or numbers of `experts_route`,
        weights in tiles of all experts (`tiled_experts`) -> act [M, slots, width] bf16; a shared
        expert, the last, has the last slot; columns from the experts' width on are zero
Fused   RMS norm of x, as in `gemv`; of a lone token the choice of experts; SwiGLU
Bytes   of the experts that are chosen N*K*bits/8 + 2*N*K/G each
Plan    a program takes tiles of one expert for one token, as a program of `gemv` does for one: so a
        token's bits are those that it has alone, and tokens with one expert meet in L2. Its warps
        choose the expert from the scores. The next kernel may start once this one has waited,
        which it relies on (`experts_down`): so never earlier
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.codec import CODECS
from lowbit.runtime.kernels.experts.choice import expert_of, likeliest, scores_of
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
    experts_gate_up_launch,
    experts_gate_up_launches,
)
from lowbit.runtime.kernels.launch.linear import GemvLaunch
from lowbit.runtime.kernels.linear.digits import stage_tokens
from lowbit.runtime.kernels.linear.norm import load_gains, norm_factor, total_of
from lowbit.runtime.kernels.linear.products import (
    column_of,
    load_steps,
    multiply_round,
    tile_addresses,
    unit_of,
)
from lowbit.runtime.kernels.linear.program import (
    Packed,
    gain_turns,
    shared_bytes,
    staged_bytes,
    staged_digits,
)
from lowbit.runtime.kernels.linear.sums import sum_of_parts
from lowbit.runtime.kernels.linear.tiles import TILE, GpuLinear
from lowbit.runtime.kernels.ptx.memory import barrier, shared_memory
from lowbit.runtime.kernels.ptx.mma import threads
from lowbit.runtime.weights.linear import ExpertWeights

HELD = gl.constexpr(8)  # lanes with results


@gluon.jit(do_not_specialize=["tiles"])
def _experts_gate_up_kernel(
    x_ptr, gain_ptr, scores_ptr, numbers_ptr, words_ptr, scales_ptr, act_ptr, tiles, eps,
    PLAN: gl.constexpr,
):  # fmt: skip
    CHOICE: gl.constexpr = PLAN.CHOICE
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    TILES: gl.constexpr = PLAN.LAUNCH.tiles
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    WARP_GROUPS: gl.constexpr = PLAN.LAUNCH.warp_groups
    ROUNDS: gl.constexpr = PLAN.LAUNCH.rounds
    SUMS: gl.constexpr = PLAN.SUMS
    PARTS: gl.constexpr = WARPS // WARP_GROUPS  # warps that share a tile
    AHEAD: gl.constexpr = min(PLAN.LAUNCH.steps, (W.STEPS + PARTS - 1) // PARTS)
    ITEMS: gl.constexpr = ROUNDS * WARP_GROUPS * TILES
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = shared_memory(PLAN.SHARED, WARPS, tiles < 0) + zero
    g = lane // 4
    t = lane % 4
    part = warp % PARTS
    token = gl.program_id(1) // CHOICE.SLOTS
    slot = gl.program_id(1) % CHOICE.SLOTS
    first_tile = gl.program_id(0) * ITEMS
    gains = load_gains(gain_ptr, warp, lane, gain_turns(X.BLOCKS, 1, WARPS), WARPS, X)
    if PLAN.PDL:
        gdc_wait()
        gdc_launch_dependents()
    if numbers_ptr is not None:
        expert = gl.load(numbers_ptr + gl.program_id(1)) + zero
    else:
        numbers, _ = likeliest(scores_of(scores_ptr, token, zero, CHOICE), lane, CHOICE)
        expert = expert_of(slot + zero, numbers, CHOICE)
    own_tile = expert * tiles + first_tile + warp // PARTS * TILES
    at = tile_addresses(words_ptr, scales_ptr, own_tile, (expert + 1) * tiles, part, lane, TILES, W)
    loaded = load_steps(at, part, 0, AHEAD, PARTS, W)
    stage_tokens(
        x_ptr + token.to(gl.int64) * W.K, (), gains, None, buffer, warp, lane, zero_f32, 1, eps, 0,
        W.CODEC.SUBBYTE, WARPS, X,
    )  # fmt: skip
    barrier()
    factor = zero_f32 + W.CODEC.FACTOR
    factor *= norm_factor(total_of(buffer + X.SQUARES, lane, zero_f32, X), eps, W.K)
    digits = buffer + column_of(lane, X) + part * (W.CODEC.BLOCKS * X.NEXT)
    units = buffer + X.UNITS + unit_of(lane, 1)
    own = (part, gl.where(t % 2 == 0, 256, 0), t == 0, g)
    for turn in gl.static_range(ROUNDS):
        next_at = tile_addresses(
            words_ptr, scales_ptr, own_tile + (turn + 1) * (WARP_GROUPS * TILES),
            (expert + 1) * tiles, part, lane, TILES, W,
        )  # fmt: skip
        loaded = multiply_round(
            loaded, at, next_at, digits, units, own, turn * WARP_GROUPS + warp // PARTS,
            buffer + SUMS, zero_f32, turn + 1 < ROUNDS, AHEAD, PARTS, W, X,
        )  # fmt: skip
        at = next_at
    barrier()
    for first in gl.static_range(0, ITEMS, WARPS):
        item = first + warp
        here = buffer + SUMS + (gl.minimum(item, ITEMS - 1) * (PARTS * HELD) + g) * 8
        y = sum_of_parts(here, PARTS, HELD, 1)  # a row of gate and the same of up
        gate = y[0] * factor
        act = gate * (y[1] * factor) / (1.0 + gl.exp(-gate))
        n = (first_tile + item) * 8 + g
        act = gl.where(n < PLAN.INNER, act, 0.0)
        act_at = act_ptr + gl.program_id(1).to(gl.int64) * PLAN.WIDTH + n
        stored = (t == 0) & (item < ITEMS) & (n < PLAN.WIDTH)
        gl.store(act_at, act.to(act_ptr.dtype.element_ty), mask=stored)


def experts_gate_up_bytes(bits: int, inner: int, hidden: int) -> int:
    """The most shared memory of a program, for any number of tokens."""
    tiles, steps = -(-2 * inner // TILE), -(-hidden // CODECS[bits].STEP_K)
    launches = experts_gate_up_launches(bits, tiles, steps)
    return max(shared_bytes(hidden, launch, 1, True) for launch in launches)


def experts_gate_up(
    x: Tensor,
    norm: Tensor,
    eps: float,
    scores: Tensor,
    routes: Routes | None,
    experts: ExpertWeights[GpuLinear],
) -> Tensor:
    """SwiGLU of every token by each of its experts: [M, slots, padded_width(I)] in x's dtype.

    Args:
        x: [M, K] bfloat16, contiguous.
        norm: [K] gain of the RMS norm.
        scores: [M, experts] float32, of the router.
        routes: of `experts_route`; None lets every warp choose for itself.
        experts: of `gathered`.
    """
    w, choice = stacked(experts.gate_up), choice_of(experts)
    M, inner, slots = x.shape[0], w.N // 2, choice.SLOTS
    width = padded_width(inner)
    launch = experts_gate_up_launch(w.bits, w.tiles, w.steps, M)
    pdl = programmatic_launch(x)
    act = torch.empty((M, slots, width), dtype=x.dtype, device=x.device)
    run(
        _experts_gate_up_kernel,
        (-(-width // (8 * launch.program_tiles)), M * slots),
        x,
        norm,
        scores,
        None if routes is None else routes.numbers,
        w.words,
        w.scales.view(torch.int32),
        act,
        w.tiles,
        eps,
        PLAN=_plan(choice, w.constants, launch, inner, pdl),
        num_warps=launch.warps,
        maxnreg=register_cap(x, launch.registers),
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return act


@cache
def _plan(choice: Choice, W: Packed, launch: GemvLaunch, inner: int, pdl: bool) -> ExpertsPlan:
    return ExpertsPlan(
        choice,
        W,
        X=staged_digits(W.K),
        LAUNCH=launch,
        INNER=inner,
        WIDTH=padded_width(inner),
        SUMS=staged_bytes(W.K, 1, True),
        SHARED=max(launch.shared << 10 if pdl else 0, shared_bytes(W.K, launch, 1, True)),
        PDL=pdl,
    )
