"""wgmma: sums[n, b] = sum_k scale[n, k / G] * code[n, k] * x[b, k] of 9 to 64 tokens, on Hopper.

Layout  weight in tiles of 16 rows as `gemv` reads them (`tiles`): four tiles are the 64 rows of a
        warpgroup, and a lane's words are its A fragment as they lie. x as `swizzled_digits`: for
        every step the rows of 3 planes x tokens. Sums as `gemv_join_kernel` reads them
Bytes   N*K*bits/8 + 2*N*K/G, and 4*N*tokens written for each slice
Plan    `slices` programs share rows; each has some of the parts into which `gemv` splits K. A
        program copies their digits into shared memory once, in bulk, and multiplies all its rows
        with them: 3 * tokens columns of one wgmma. Each lane copies the words that it needs itself
        into a ring of its own, so warps meet nowhere but in the products. Groups smaller than a
        step have sums of their own: of few tokens one is scaled while the next is multiplied
Bits    integer sums are exact; scales multiply them in the order of k, and parts are added as
        `tree_sum` adds them: a token has the bits that it has alone
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import run
from lowbit.runtime.kernels.launch.linear import WgmmaLaunch, groups_of_step
from lowbit.runtime.kernels.linear.program import Digits, Packed, swizzled_digits
from lowbit.runtime.kernels.linear.sums import (
    BIAS,
    MAGIC,
    TOP_WEIGHT,
)
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    commit_copies,
    copy4,
    copy16_or_zeros,
    large_shared_buffer,
    large_size,
    load_shared4,
    load_shared8,
    load_shared16,
    store16,
    wait_copies,
)
from lowbit.runtime.kernels.ptx.mma import (
    as_float,
    as_word,
    from_row,
    threads,
    unpacked_scales,
    zeros,
)
from lowbit.runtime.kernels.ptx.wgmma import (
    awaited,
    bulk_copy,
    descriptor,
    expect_bytes,
    init_barriers,
    multiply_group,
    multiply_step,
    wait_bytes,
)

WARPGROUPS = gl.constexpr(2)  # of a program
MOST_REGISTERS = 255  # of a thread
# Codes of 4 and 8 bits, by tokens, as measured: with fewer registers programs of the join find room
# beside these, and begin when they end.
REGISTERS = {16: 240, 32: 208, 64: 240}
GROUPS_REGISTERS = 240  # where scales change within a step; 32 tokens with 208 serialize products
# Tokens up to which a lane has registers for the sums of two groups, of which one is multiplied
# while the other is scaled.
TWO_SUMS = gl.constexpr(32)


@dataclass(frozen=True, slots=True, eq=False)
class WgmmaPlan:
    """Constants of `wgmma` and of the join behind it; made once, so compared by identity."""

    W: Packed  # the weight
    X: Digits  # places of the digits
    LAUNCH: WgmmaLaunch  # share of a program
    PARTS: int  # into which `gemv` splits K
    S: int  # steps of a part, those past K included
    JOINED: int  # sums of a tile, which the join adds
    GROUPS: int  # sums of a step with scales of their own; see `groups_of_step`
    PAIRED: bool  # whether rows are those of gate and up in turn
    ADDED_ROWS: bool  # whether each token has its own row of what is added
    SHARED: int  # bytes of shared memory
    PDL: bool = True  # true, as the join's other plans say it


@cache
def wgmma_plan(
    W: Packed, launch: WgmmaLaunch, parts: int, tokens: int, paired: bool, added_rows: bool
) -> WgmmaPlan:
    """Constants for 16, 32 or 64 tokens, in the parts of a lone token."""
    X = swizzled_digits(W.K, W.BITS, tokens, parts * launch.part_steps)
    return WgmmaPlan(
        W, X, launch, parts, launch.part_steps, launch.slices, groups_of_step(W.BITS, W.G), paired,
        added_rows,
        SHARED=large_size(launch.shared_bytes(W.BITS, parts, tokens)),
    )  # fmt: skip


def _registers(plan: WgmmaPlan) -> int:
    """Most registers of a thread."""
    if plan.W.CODEC.ROWS > 1:
        return MOST_REGISTERS
    return REGISTERS[plan.X.TOKENS] if plan.GROUPS == 1 else GROUPS_REGISTERS


def wgmma(planes: Tensor, w: TiledLinear, plan: WgmmaPlan) -> Tensor:
    """Sums of every slice, for the join: [tiles, tokens / 8, slices, 32 lanes, 4] float32."""
    tokens, slices = plan.X.TOKENS, plan.LAUNCH.slices
    sums = torch.empty(
        w.tiles * (tokens // 8) * slices * 128, dtype=torch.float32, device=planes.device
    )
    blocks = -(-w.tiles // 4)
    each = -(-blocks // plan.LAUNCH.columns)  # blocks of 64 rows of a program
    turns = -(-each // WARPGROUPS.value) * (plan.PARTS // slices)
    run(
        _wgmma_kernel,
        (min(plan.LAUNCH.columns, blocks), slices),
        planes,
        w.words,
        w.scales.view(torch.int32),
        sums,
        w.tiles,
        turns,
        PLAN=plan,
        num_warps=4 * WARPGROUPS.value,
        maxnreg=_registers(plan),
        launch_pdl=True,
        enable_fp_fusion=True,
    )
    return sums


@gluon.jit(do_not_specialize=["tiles", "turns"])
def _wgmma_kernel(
    digits_ptr, words_ptr, scales_ptr, sums_ptr, tiles, turns, PLAN: gl.constexpr
):  # fmt: skip
    """A turn is one of a program's parts, of one block of 64 rows for each warpgroup."""
    W: gl.constexpr = PLAN.W
    WARPS: gl.constexpr = 4 * WARPGROUPS
    SLICES: gl.constexpr = PLAN.LAUNCH.slices
    TOKENS: gl.constexpr = PLAN.X.TOKENS
    ROW: gl.constexpr = PLAN.X.ROW
    ROWS: gl.constexpr = W.CODEC.ROWS
    LOADS: gl.constexpr = W.CODEC.LOADS
    SLOT: gl.constexpr = W.CODEC.STEP_BYTES + 128 * ROWS  # of a warp's step in the ring
    S: gl.constexpr = PLAN.S
    OWN: gl.constexpr = PLAN.PARTS // SLICES  # parts of a program
    C: gl.constexpr = PLAN.LAUNCH.ahead
    NT: gl.constexpr = TOKENS // 8
    HALF_BYTES: gl.constexpr = 3 * TOKENS * ROW
    STEP_BYTES: gl.constexpr = HALF_BYTES * ROWS
    UNIT_BYTES: gl.constexpr = TOKENS * 4 * ROWS
    SCALES: gl.constexpr = W.SCALES  # Triton 3.6 takes no text from a record as an argument
    gdc_launch_dependents()
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = (large_shared_buffer(tiles < 0, PLAN.SHARED, WARPS) + zero + 1023) & -1024
    units = buffer + S * OWN * STEP_BYTES
    done = units + S * OWN * UNIT_BYTES
    ring = done + (S * 8 + 15) // 16 * 16 + warp * (C * SLOT)
    slice_ = gl.program_id(1)
    tile, there, words, scales = _place_of(0, warp, lane, tiles, words_ptr, scales_ptr, OWN, W)
    init_barriers(done, (warp == 0) & (lane == 0), S)
    for c in gl.static_range(C):
        _begin_step(
            ring + c * SLOT, lane, words + slice_ * (OWN * W.CODEC.STEP_BYTES), scales, there,
            zero + slice_ * OWN, c, PLAN,
        )  # fmt: skip
    barrier()
    gdc_wait()
    _copy_digits(digits_ptr, buffer, units, done, warp, lane, slice_, OWN, PLAN)
    y = zeros(zero_f32, 4 * NT if OWN > 1 else 0)
    pair = zeros(zero_f32, 4 * NT if OWN > 2 else 0)
    for turn in range(turns):
        next_tile, next_there, next_words, next_scales = _place_of(
            turn + 1, warp, lane, tiles, words_ptr, scales_ptr, OWN, W
        )
        part = turn % OWN
        digits = descriptor(buffer + part * STEP_BYTES, ROW)
        part_units = units + (part * (TOKENS * ROWS) + lane % 4 * 2) * 4
        low = zeros(zero_f32, 4 * NT)
        top = zeros(zero_f32, 4 * NT)
        for first in range(0, S, C):
            for c in gl.static_range(C):  # free here; between products each would wait for them
                wait_bytes(done + (first + c) * 8, turn + zero < OWN)
            last = first + C + zero >= S
            then_step = gl.where(
                last,
                slice_ * OWN + (turn + 1) % OWN,
                slice_ * OWN + part + (first + C) * PLAN.PARTS,
            )
            then_words = gl.where(last, next_words, words) + then_step * W.CODEC.STEP_BYTES
            then_scales = gl.where(last, next_scales, scales)
            then_there = gl.where(last, next_there, there)
            here = digits + (first * (OWN * STEP_BYTES // 16)).to(gl.int64)
            own_units = part_units + first * (OWN * UNIT_BYTES)
            for c in gl.static_range(C):
                slot = ring + c * SLOT
                wait_copies(C - 1)
                loads = ()
                for i in gl.static_range(LOADS):
                    loads = loads + (load_shared16(slot + lane * 16, 512 * i),)
                raw = ()
                for half in gl.static_range(ROWS):
                    raw = raw + (as_word(load_shared4(slot + lane * 4, 512 * LOADS + 128 * half)),)
                _begin_step(slot, lane, then_words, then_scales, then_there, then_step, c, PLAN)
                if PLAN.GROUPS > 1:
                    low, top = _add_groups(low, top, loads, raw, here, own_units, c, PLAN)
                for half in gl.static_range(ROWS if PLAN.GROUPS == 1 else 0):
                    d = multiply_step(
                        loads, here, half, 3 * TOKENS, W.BITS,
                        c * OWN * STEP_BYTES + half * HALF_BYTES,
                    )  # fmt: skip
                    low, top = _add_products(
                        low, top, d, unpacked_scales(raw[half], SCALES), own_units,
                        c * OWN * UNIT_BYTES + half * (TOKENS * 4), NT,
                    )  # fmt: skip
        sums = ()
        for i in gl.static_range(4 * NT):
            sums = sums + (low[i] + TOP_WEIGHT * top[i],)
        if OWN > 1:
            y, pair = _add_part(y, pair, sums, part, OWN, NT)
            sums = y
        if part == OWN - 1:
            at = sums_ptr.to(gl.int64, bitcast=True) + lane * 16
            at += (tile * (NT * SLICES) + slice_).to(gl.int64) * 512
            for i in gl.static_range(NT):
                four = (as_word(sums[4 * i]), as_word(sums[4 * i + 1]), as_word(sums[4 * i + 2]))
                store16(at + i * (SLICES * 512), four + (as_word(sums[4 * i + 3]),), there)
        tile = next_tile
        there = next_there
        words = next_words
        scales = next_scales


@gluon.jit
def _copy_digits(
    digits_ptr, buffer, units, done, warp, lane, slice_, OWN: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Begin to copy this slice's digits and units: a lane each for a step of all OWN parts."""
    S: gl.constexpr = PLAN.S
    TOKENS: gl.constexpr = PLAN.X.TOKENS
    ROWS: gl.constexpr = OWN * PLAN.W.CODEC.ROWS
    BYTES: gl.constexpr = ROWS * 3 * TOKENS * PLAN.X.ROW
    UNIT_BYTES: gl.constexpr = ROWS * TOKENS * 4
    source = digits_ptr.to(gl.int64, bitcast=True)
    for first in gl.static_range(0, S, 32):
        step = first + lane
        leads = (warp == 0) & (step < S)
        step = gl.minimum(step, S - 1)
        own = done + step * 8
        expect_bytes(own, leads, BYTES + UNIT_BYTES)
        at = ((step * PLAN.PARTS + slice_ * OWN) * PLAN.W.CODEC.ROWS).to(gl.int64)
        bulk_copy(buffer + step * BYTES, source + at * (3 * TOKENS * PLAN.X.ROW), own, leads, BYTES)
        bulk_copy(
            units + step * UNIT_BYTES, source + PLAN.X.UNITS + at * (TOKENS * 4), own, leads,
            UNIT_BYTES,
        )  # fmt: skip


@gluon.jit
def _begin_step(
    slot, lane, words, scales, there, step, c: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Begin to copy 16 rows of the c-th step from `step` on: each lane what it will read itself.

    Of a step's scales each of the four lanes of a row copies those of one group.

    words: at `step`; scales: of the first group.
    """
    W: gl.constexpr = PLAN.W
    STEP_K: gl.constexpr = W.CODEC.STEP_K
    FORWARD: gl.constexpr = c * PLAN.PARTS
    ROW: gl.constexpr = PLAN.X.ROW
    ROWS: gl.constexpr = W.CODEC.ROWS
    LOADS: gl.constexpr = W.CODEC.LOADS
    GROUPS: gl.constexpr = PLAN.GROUPS
    WHOLE: gl.constexpr = PLAN.X.STEPS == W.STEPS * ROWS  # no step is past K
    AT: gl.constexpr = FORWARD * W.CODEC.STEP_BYTES if WHOLE else 0
    if not WHOLE:
        words = words + gl.minimum(FORWARD, W.STEPS - 1 - step) * W.CODEC.STEP_BYTES
    for i in gl.static_range(LOADS):
        copy16_or_zeros(slot + lane * 16, words, there, 512 * i, AT + 512 * i)
    for half in gl.static_range(ROWS):
        if WHOLE and PLAN.PARTS * STEP_K % W.G == 0 and (GROUPS == 1 or STEP_K % W.G == 0):
            at_scales = scales + (step * STEP_K + half * ROW) // W.G * 32
            if GROUPS > 1:
                at_scales += lane % GROUPS * 32
            copy4(
                slot + lane * 4, at_scales, FORWARD * STEP_K // W.G * 32,
                512 * LOADS + 128 * half,
            )  # fmt: skip
        else:
            own = gl.minimum(step + FORWARD, W.STEPS - 1)
            first = own * STEP_K + half * ROW
            if GROUPS > 1:
                first += lane % GROUPS * (ROW // GROUPS)
            group = first // W.G
            if half > 0 or GROUPS > 1:  # which may lie past K
                group = gl.minimum(group, W.GROUPS - 1)
            copy4(slot + lane * 4, scales + group * 32, 0, 512 * LOADS + 128 * half)
    commit_copies()


@gluon.jit
def _add_groups(
    low, top, loads, raw, digits, units, c: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """`low` and `top` with the c-th step from here on, whose groups have scales of their own.

    raw: a word of scales, of the group whose number is that of the lane among the four of a row.
    """
    GROUPS: gl.constexpr = PLAN.GROUPS
    TOKENS: gl.constexpr = PLAN.X.TOKENS
    UNITS_AT: gl.constexpr = c * (PLAN.PARTS // PLAN.LAUNCH.slices) * (TOKENS * 4)
    SCALES: gl.constexpr = PLAN.W.SCALES
    EARLY: gl.constexpr = TOKENS <= TWO_SUMS
    d = _multiply_group(loads, digits, c, 0, PLAN)
    for i in gl.static_range(GROUPS):
        then = d
        if EARLY and i + 1 < GROUPS:
            then = _multiply_group(loads, digits, c, i + 1, PLAN)
        if EARLY:
            d = awaited(d, 1 if i + 1 < GROUPS else 0)
        scale = unpacked_scales(from_row(raw[0], i), SCALES)
        low, top = _add_products(low, top, d, scale, units, UNITS_AT, TOKENS // 8)
        if not EARLY and i + 1 < GROUPS:
            then = _multiply_group(loads, digits, c, i + 1, PLAN)
        d = then
    return low, top


@gluon.jit
def _multiply_group(loads, digits, c: gl.constexpr, i: gl.constexpr, PLAN: gl.constexpr):
    """Sums of the i-th group of the c-th step from here on; under way behind it, if few tokens."""
    GROUPS: gl.constexpr = PLAN.GROUPS
    BITS: gl.constexpr = PLAN.W.BITS
    TOKENS: gl.constexpr = PLAN.X.TOKENS
    K: gl.constexpr = PLAN.X.ROW // GROUPS
    AT: gl.constexpr = c * (PLAN.PARTS // PLAN.LAUNCH.slices) * (3 * TOKENS * PLAN.X.ROW) + i * K
    WAITS: gl.constexpr = TOKENS > TWO_SUMS
    words = ()
    for load in gl.static_range(len(loads)):
        for j in gl.static_range(i * 4 // GROUPS, (i + 1) * 4 // GROUPS):
            words = words + (loads[load][j],)
    return multiply_group(words, digits, 3 * TOKENS, BITS, AT, K, WAITS)


@gluon.jit
def _add_products(low, top, d, scale, units, AT: gl.constexpr, NT: gl.constexpr):
    """`low` and `top` with a step's sums times scales and units; as `gemv` rounds them.

    The lower two digits' sum goes through a conversion, the last digit's through `MAGIC`, which
    share the work between two pipes of the multiprocessor.
    """
    new_low = ()
    new_top = ()
    for i in gl.static_range(NT):
        pair = load_shared8(units, AT + i * 32)
        for j in gl.static_range(4):
            factor = scale[j // 2] * as_float(pair[j % 2])
            first = (d[4 * i + j] + d[4 * (NT + i) + j] * 256).to(gl.float32)
            last = as_float(d[4 * (2 * NT + i) + j] + MAGIC) - BIAS
            new_low = new_low + (low[4 * i + j] + factor * first,)
            new_top = new_top + (top[4 * i + j] + factor * last,)
    return new_low, new_top


@gluon.jit
def _place_of(
    turn, warp, lane, tiles, words_ptr, scales_ptr, OWN: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """A warp's tile in a turn, whether there is one, and where its words and scales begin."""
    block = gl.program_id(0) + (turn // OWN * WARPGROUPS + warp // 4) * gl.num_programs(0)
    tile = block * 4 + warp % 4
    own = gl.minimum(tile, tiles - 1)
    TILE_BYTES: gl.constexpr = W.STEPS * W.CODEC.STEP_BYTES
    words = words_ptr.to(gl.int64, bitcast=True) + lane * 16 + own.to(gl.int64) * TILE_BYTES
    row = own * (W.GROUPS * 8) + lane // 4
    scales = scales_ptr.to(gl.int64, bitcast=True) + row.to(gl.int64) * 4
    return tile, tile < tiles, words, scales


@gluon.jit
def _add_part(y, pair, sums, part, OWN: gl.constexpr, NT: gl.constexpr):
    """Y with the sums of one of two or four parts, in the order of `tree_sum`."""
    gl.static_assert(OWN == 2 or OWN == 4)
    new_y = ()
    new_pair = ()
    for i in gl.static_range(4 * NT):
        own = gl.where(part % 2 == 0, sums[i], y[i] + sums[i])
        if OWN == 4:
            own = gl.where(part == 3, pair[i] + own, own)
            new_pair = new_pair + (gl.where(part == 1, own, pair[i]),)
        new_y = new_y + (own,)
    return new_y, new_pair
