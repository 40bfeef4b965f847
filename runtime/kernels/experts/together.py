"""experts_together: the experts of many tokens, each read once for up to GROUP tokens.

    act[p] = silu(gate_e @ h_b) * (up_e @ h_b)      e = expert of the pair p = b * slots + slot
    part[p] = down_e @ act[p]                       FP32
    y[b] = x[b] + sum_s share[b, s] * part[b * slots + s]

Layout  x [M, h] bf16, numbers and shares [M, slots] of `experts_route`, weights in tiles of all
        experts (`tiled_experts`) -> act [M, slots, width] bf16, part [M * slots, h] fp32, y [M, h]
Fused   RMS norm of x; SwiGLU; the weighted sum and the residual
Bytes   of the experts that any token has chosen N*K*bits/8 + 2*N*K/G each
Plan    a program takes tiles of an expert for a group of its pairs (`experts_groups`). Their digits
        are the columns of the same products (`products`), so a token has the bits that it has
        alone: steps are summed by as many warps as for a lone token, or one by one, and shares in
        the order of its slots (`experts_weigh`). Tokens become digits once, and programs copy
        those of their group
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.experts.groups import groups_of
from lowbit.runtime.kernels.experts.program import (
    Choice,
    ExpertsPlan,
    choice_of,
    padded_width,
)
from lowbit.runtime.kernels.experts.route import Routes
from lowbit.runtime.kernels.experts.tiled import stacked
from lowbit.runtime.kernels.experts.weigh import weighed
from lowbit.runtime.kernels.launch.device import (
    programmatic_launch,
    register_cap,
    run,
)
from lowbit.runtime.kernels.launch.experts import GROUP, together_launches
from lowbit.runtime.kernels.launch.linear import GemvLaunch
from lowbit.runtime.kernels.linear.digits import digits, given_factor, stage_tokens
from lowbit.runtime.kernels.linear.gemv_several import multiply_looped
from lowbit.runtime.kernels.linear.products import (
    column_of,
    load_steps,
    multiply_steps,
    tile_addresses,
    unit_of,
    zero_sums,
)
from lowbit.runtime.kernels.linear.program import Packed, staged_bytes, staged_digits
from lowbit.runtime.kernels.linear.sums import store_sums, sum_of_parts
from lowbit.runtime.kernels.linear.tiles import GpuLinear
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    commit_copies,
    copy4,
    copy16,
    shared_memory,
    wait_copies,
)
from lowbit.runtime.kernels.ptx.mma import threads
from lowbit.runtime.thresholds import EXPERTS_TOKENS
from lowbit.runtime.weights.linear import ExpertWeights

LANES = gl.constexpr(16)  # with results: rows g and g + 8 of one of two tokens


@gluon.jit(do_not_specialize=["tiles"])
def _experts_gate_up_together_kernel(
    digits_ptr, numbers_ptr, groups_ptr, words_ptr, scales_ptr, act_ptr, tiles,
    PLAN: gl.constexpr, GIVEN: gl.constexpr,
):  # fmt: skip
    """PLAN: an `ExpertsPlan`; GIVEN: `Digits` of all tokens."""
    X: gl.constexpr = PLAN.X
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = shared_memory(PLAN.SHARED, WARPS, tiles < 0) + zero
    if PLAN.PDL:
        gdc_wait()
        gdc_launch_dependents()
    pairs = _pairs_of_group(groups_ptr, X)
    if pairs[0] >= 0:
        expert = gl.load(numbers_ptr + pairs[0]) + zero
        _gate_up(
            digits_ptr, expert, pairs, words_ptr, scales_ptr, act_ptr, tiles, buffer, warp, lane,
            zero_f32, PLAN, GIVEN,
        )  # fmt: skip


@gluon.jit
def _pairs_of_group(groups_ptr, X: gl.constexpr):
    """The pairs of a program's group, -1 for none."""
    TOKENS: gl.constexpr = X.TOKENS
    pairs = ()
    for i in gl.static_range(TOKENS):
        pairs = pairs + (gl.load(groups_ptr + gl.program_id(1) * TOKENS + i),)
    return pairs


@gluon.jit
def _row_addresses(act_ptr, pairs, zero_f32, WIDTH: gl.constexpr):
    """Addresses of the rows of all pairs, that of the first for none."""
    zero = zero_f32.to(gl.int64)
    rows = ()
    for i in gl.static_range(len(pairs)):
        row = gl.where(pairs[i] < 0, pairs[0], pairs[i]).to(gl.int64)
        rows = rows + (act_ptr.to(gl.int64, bitcast=True) + row * (2 * WIDTH) + zero,)
    return rows


@gluon.jit
def _gate_up(
    digits_ptr, expert, pairs, words_ptr, scales_ptr, act_ptr, tiles, buffer, warp, lane, zero_f32,
    PLAN: gl.constexpr, GIVEN: gl.constexpr,
):  # fmt: skip
    """A program's tiles of gate and up of an expert for the tokens of some pairs."""
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    TILES: gl.constexpr = PLAN.LAUNCH.tiles
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    WARP_GROUPS: gl.constexpr = PLAN.LAUNCH.warp_groups
    ROUNDS: gl.constexpr = PLAN.LAUNCH.rounds
    PARTS: gl.constexpr = WARPS // WARP_GROUPS  # warps that share a tile, as of a lone token
    AHEAD: gl.constexpr = min(PLAN.LAUNCH.steps, (W.STEPS + PARTS - 1) // PARTS)
    NT: gl.constexpr = (X.TOKENS + 1) // 2
    ITEMS: gl.constexpr = ROUNDS * WARP_GROUPS * TILES * NT
    g = lane // 4
    t = lane % 4
    part = warp % PARTS
    first_tile = gl.program_id(0) * (ROUNDS * WARP_GROUPS * TILES)
    tile = expert * tiles + first_tile + warp // PARTS * TILES
    end = (expert + 1) * tiles
    at = tile_addresses(words_ptr, scales_ptr, tile, end, part, lane, TILES, W)
    loaded = load_steps(at, part, 0, AHEAD, PARTS, W)
    _copy_digits(digits_ptr, pairs, buffer, warp, lane, zero_f32, PLAN, GIVEN)
    digits = buffer + column_of(lane, X) + part * (W.CODEC.BLOCKS * X.NEXT)
    units = buffer + X.UNITS + unit_of(lane, X.TOKENS)
    own = (part, gl.where(t % 2 == 0, 256, 0), t % 2 == 0, lane // 2)
    sums_at = buffer + PLAN.SUMS
    for turn in range(ROUNDS):
        next_tile = tile + gl.minimum(turn + 1, ROUNDS - 1) * (WARP_GROUPS * TILES)
        next_at = tile_addresses(words_ptr, scales_ptr, next_tile, end, part, lane, TILES, W)
        loaded = multiply_looped(
            loaded, at, next_at, digits, units, own, turn * WARP_GROUPS + warp // PARTS, sums_at,
            zero_f32, True, AHEAD, PARTS, W, X,
        )  # fmt: skip
        at = next_at
    barrier()
    for first in gl.static_range(0, ITEMS, WARPS):
        item = first + warp
        here = sums_at + (gl.minimum(item, ITEMS - 1) * (PARTS * LANES) + lane // 2) * 8
        y = sum_of_parts(here, PARTS, LANES, 1)  # a row of gate and the same of up
        b = item % NT * 2 + t // 2
        pair = _pair_of(b, pairs)
        factor = given_factor(digits_ptr, gl.maximum(pair, 0) // PLAN.CHOICE.SLOTS, GIVEN)
        factor *= W.CODEC.FACTOR
        gate = y[0] * factor
        act = gate * (y[1] * factor) / (1.0 + gl.exp(-gate))
        n = (first_tile + item // NT) * 8 + g
        act = gl.where(n < PLAN.INNER, act, 0.0)
        stored = (t % 2 == 0) & (item < ITEMS) & (n < PLAN.WIDTH) & (pair >= 0)
        to = act_ptr + pair.to(gl.int64) * PLAN.WIDTH + n
        gl.store(to, act.to(act_ptr.dtype.element_ty), mask=stored)


@gluon.jit
def _copy_digits(
    digits_ptr, pairs, buffer, warp, lane, zero_f32, PLAN: gl.constexpr, GIVEN: gl.constexpr
):  # fmt: skip
    """Put digits and units of a group's tokens into shared memory, the first's again for none."""
    X: gl.constexpr = PLAN.X
    THREADS: gl.constexpr = PLAN.LAUNCH.warps * 32
    CHUNKS: gl.constexpr = X.TOKEN // 16
    BLOCKS: gl.constexpr = X.BLOCKS
    thread = warp * 32 + lane
    given = digits_ptr.to(gl.int64, bitcast=True) + zero_f32.to(gl.int64)
    for i in gl.static_range(len(pairs)):
        token = gl.where(pairs[i] < 0, pairs[0], pairs[i]) // PLAN.CHOICE.SLOTS
        for first in gl.static_range(0, CHUNKS, THREADS):
            at = gl.minimum(first + thread, CHUNKS - 1) * 16  # past the end: the last one again
            copy16(buffer + at, given + (token * X.TOKEN + at).to(gl.int64), AT=i * X.TOKEN)
        for first in gl.static_range(0, BLOCKS, THREADS):
            block = gl.minimum(first + thread, BLOCKS - 1)
            unit = GIVEN.UNITS + (block * GIVEN.TOKENS + token) * 4
            copy4(buffer + block * (X.TOKENS * 4), given + unit.to(gl.int64), AT=X.UNITS + i * 4)
    commit_copies()
    wait_copies(0)
    barrier()


@gluon.jit
def _pair_of(b, pairs):
    pair = b * 0 + pairs[0]
    for i in gl.static_range(1, len(pairs)):
        pair = gl.where(b == i, pairs[i], pair)
    return pair


@gluon.jit(do_not_specialize=["N", "tiles"])
def _experts_down_together_kernel(
    act_ptr, numbers_ptr, groups_ptr, words_ptr, scales_ptr, part_ptr, N, tiles,
    PLAN: gl.constexpr,
):  # fmt: skip
    X: gl.constexpr = PLAN.X
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = shared_memory(PLAN.SHARED, WARPS, N < 0) + zero
    if PLAN.PDL:
        gdc_wait()
        gdc_launch_dependents()
    pairs = _pairs_of_group(groups_ptr, X)
    if pairs[0] >= 0:
        expert = gl.load(numbers_ptr + pairs[0]) + zero
        _down(
            act_ptr, expert, pairs, words_ptr, scales_ptr, part_ptr, N, tiles, buffer, warp, lane,
            zero_f32, PLAN,
        )  # fmt: skip


@gluon.jit
def _down(
    act_ptr, expert, pairs, words_ptr, scales_ptr, part_ptr, N, tiles, buffer, warp, lane, zero_f32,
    PLAN: gl.constexpr,
):  # fmt: skip
    """A program's tiles of down of an expert for some pairs; each step is summed by itself."""
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    TILES: gl.constexpr = PLAN.LAUNCH.tiles
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    ROUNDS: gl.constexpr = PLAN.LAUNCH.rounds
    STEPS: gl.constexpr = W.STEPS
    OWN: gl.constexpr = (STEPS + WARPS - 1) // WARPS
    NT: gl.constexpr = (X.TOKENS + 1) // 2
    ITEMS: gl.constexpr = ROUNDS * TILES * NT
    g = lane // 4
    t = lane % 4
    first_tile = gl.program_id(0) * (ROUNDS * TILES)
    loaded = _load_own(words_ptr, scales_ptr, expert, tiles, first_tile, warp, lane, PLAN)
    rows = _row_addresses(act_ptr, pairs, zero_f32, PLAN.WIDTH)
    stage_tokens(
        act_ptr, rows, (), None, buffer, warp, lane, zero_f32, X.TOKENS, 0.0, 0, W.CODEC.SUBBYTE,
        WARPS, X,
    )  # fmt: skip
    barrier()
    sums_at = buffer + PLAN.SUMS
    mixed = gl.where(t % 2 == 0, 256, 0)
    for turn in gl.static_range(ROUNDS):
        next_loaded = ()
        if turn + 1 < ROUNDS:
            next_loaded = _load_own(
                words_ptr, scales_ptr, expert, tiles, first_tile + (turn + 1) * TILES, warp, lane,
                PLAN,
            )  # fmt: skip
        for i in gl.static_range(OWN):
            step = i * WARPS + warp
            mine = gl.minimum(step, STEPS - 1)
            digits = buffer + column_of(lane, X) + mine * (W.CODEC.BLOCKS * X.NEXT)
            units = buffer + X.UNITS + unit_of(lane, X.TOKENS)
            acc = multiply_steps(
                zero_sums(zero_f32, TILES, X.TOKENS), loaded[i], digits, units, mine, mixed, 0, 1,
                STEPS, W, X,
            )  # fmt: skip
            for j in gl.static_range(len(acc)):
                item = turn * len(acc) + j
                to = sums_at + ((item * STEPS + mine) * LANES + lane // 2) * 8
                store_sums(acc[j], to, (t % 2 == 0) & (step < STEPS), True)
        loaded = next_loaded
    barrier()
    factor = zero_f32 + W.CODEC.FACTOR
    for first in gl.static_range(0, ITEMS, WARPS):
        item = first + warp
        here = sums_at + (gl.minimum(item, ITEMS - 1) * STEPS * LANES + lane // 2) * 8
        y = sum_of_parts(here, STEPS, LANES, 1)
        pair = _pair_of(item % NT * 2 + t // 2, pairs)
        stored = (t % 2 == 0) & (item < ITEMS) & (pair >= 0)
        for half in gl.static_range(2):
            n = (first_tile + item // NT) * 16 + half * 8 + g
            to = part_ptr + pair.to(gl.int64) * N + n
            gl.store(to, y[half] * factor, mask=stored & (n < N))


@gluon.jit
def _load_own(
    words_ptr, scales_ptr, expert, tiles, tile, warp, lane, PLAN: gl.constexpr
):  # fmt: skip
    """Words and raw scales of a warp's steps, of a round's tiles."""
    W: gl.constexpr = PLAN.W
    TILES: gl.constexpr = PLAN.LAUNCH.tiles
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    STEPS: gl.constexpr = W.STEPS
    loaded = ()
    for i in gl.static_range((STEPS + WARPS - 1) // WARPS):
        step = gl.minimum(i * WARPS + warp, STEPS - 1)
        at = tile_addresses(
            words_ptr, scales_ptr, expert * tiles + tile, (expert + 1) * tiles, step, lane, TILES,
            W,
        )  # fmt: skip
        loaded = loaded + (load_steps(at, step, 0, 1, STEPS, W),)
    return loaded


def experts_together(
    x: Tensor,
    norm: Tensor,
    eps: float,
    routes: Routes,
    experts: ExpertWeights[GpuLinear],
    residual: Tensor,
) -> Tensor:
    """Add the weighted outputs of its experts for the normed token to every token's residual.

    Args:
        x: [M, h] bfloat16, contiguous.
        norm: [h] gain of the RMS norm.
        routes: of `experts_route`.
        experts: of `gathered`.
        residual: [M, h].

    Returns:
        [M, h] in its dtype; a token has the bits of `experts_gate_up` and `experts_down`.
    """
    gate_up, down = stacked(experts.gate_up), stacked(experts.down)
    (M, h), inner, choice = x.shape, gate_up.N // 2, choice_of(experts)
    pairs, width, pdl = M * choice.SLOTS, padded_width(inner), programmatic_launch(x)
    of_gate_up, of_down = together_launches(gate_up.bits, gate_up.tiles, gate_up.steps)
    given = staged_digits(h, EXPERTS_TOKENS)
    planes = digits(x, gate_up.bits, given, norm=norm, eps=eps)
    groups = groups_of(routes.numbers)
    act = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    run(
        _experts_gate_up_together_kernel,
        (-(-width // (8 * of_gate_up.program_tiles)), len(groups)),
        planes,
        routes.numbers,
        groups,
        gate_up.words,
        gate_up.scales.view(torch.int32),
        act,
        gate_up.tiles,
        PLAN=_gate_up_plan(choice, gate_up.constants, of_gate_up, inner, pdl),
        GIVEN=given,
        num_warps=of_gate_up.warps,
        maxnreg=register_cap(x, of_gate_up.registers),
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    parts = torch.empty((pairs, h), dtype=torch.float32, device=x.device)
    run(
        _experts_down_together_kernel,
        (-(-down.tiles // of_down.program_tiles), len(groups)),
        act,
        routes.numbers,
        groups,
        down.words,
        down.scales.view(torch.int32),
        parts,
        h,
        down.tiles,
        PLAN=_down_plan(choice, down.constants, of_down, pdl),
        num_warps=of_down.warps,
        maxnreg=register_cap(x, of_down.registers),
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return weighed(parts, routes.shares, residual)


def together_bytes(experts: ExpertWeights[GpuLinear]) -> int:
    """The most shared memory of a program of `experts_together`."""
    gate_up, down = stacked(experts.gate_up), stacked(experts.down)
    of_gate_up, of_down = together_launches(gate_up.bits, gate_up.tiles, gate_up.steps)
    return max(_gate_up_bytes(gate_up.K, of_gate_up), _down_bytes(down.K, down.steps, of_down))


def _gate_up_bytes(hidden: int, launch: GemvLaunch) -> int:
    return staged_bytes(hidden, GROUP, False) + launch.sums_bytes(GROUP)


def _down_bytes(inner: int, steps: int, launch: GemvLaunch) -> int:
    return staged_bytes(inner, GROUP, False) + launch.program_tiles * GROUP * steps * 64


@cache
def _gate_up_plan(
    choice: Choice, W: Packed, launch: GemvLaunch, inner: int, pdl: bool
) -> ExpertsPlan:
    return ExpertsPlan(
        choice,
        W,
        X=staged_digits(W.K, GROUP),
        LAUNCH=launch,
        INNER=inner,
        WIDTH=padded_width(inner),
        SUMS=staged_bytes(W.K, GROUP, False),
        SHARED=_gate_up_bytes(W.K, launch),
        PDL=pdl,
    )


@cache
def _down_plan(choice: Choice, W: Packed, launch: GemvLaunch, pdl: bool) -> ExpertsPlan:
    return ExpertsPlan(
        choice,
        W,
        X=staged_digits(W.K, GROUP),
        LAUNCH=launch,
        INNER=W.K,
        WIDTH=padded_width(W.K),
        SUMS=staged_bytes(W.K, GROUP, False),
        SHARED=_down_bytes(W.K, W.STEPS, launch),
        PDL=pdl,
    )
