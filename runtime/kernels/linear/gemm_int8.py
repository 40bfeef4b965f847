"""gemm_int8: y = added + x @ w.T of 9 tokens or more on Hopper, with x in eight bits.

    y[m, n] = sum_g s_x[m, g] * (s_w[n, g] * sum_k code[n, k] * q[m, k])     groups g in order of k

or silu(gate) * up of such a product, where the weight is paired; see `formats.activations`.

Layout  weight in tiles of 16 rows as `gemv` reads them (`tiles`): four tiles are the 64 rows of a
        warpgroup's A operand, in registers. x as `quantize` leaves it: a block's tokens of 128 k
        and their scales are one bulk copy. y [M, N] bf16, or [M, N / 2] where paired
Bytes   N*K*bits/8 + 2*N*K/G for each block of tokens, M*K*(1 + 4/128) for each block of rows,
        2*M*N written
Plan    a program takes a block of rows and tokens after the other, and adds a block's groups in one
        chain, with no split of K. Warpgroups take rows side by side; or they share rows and take
        steps in turn, and all add what each leaves. x and the words pass through rings in shared
        memory: x by bulk copies, which one warp begins, each lane's words by copies of its own
Bits    a token's results depend on nothing but the token: neither on tile nor on company
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.formats.activations import activation_group
from lowbit.runtime.kernels.launch.device import card_of, run
from lowbit.runtime.kernels.launch.int8 import ROWS, Int8Launch, int8_shared
from lowbit.runtime.kernels.linear.gemm_store import store_block
from lowbit.runtime.kernels.linear.program import Blocks, Packed, token_blocks
from lowbit.runtime.kernels.linear.quantize import factor_pair, quantize
from lowbit.runtime.kernels.linear.tiles import TILE, TiledLinear
from lowbit.runtime.kernels.ptx.int8 import add_terms, begin_turn, leave_scaled, multiply_scaled
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    commit_copies,
    copy4,
    copy16_or_zeros,
    large_shared_buffer,
    large_size,
)
from lowbit.runtime.kernels.ptx.mma import inline, threads, zeros
from lowbit.runtime.kernels.ptx.wgmma import init_barriers, next_slot


@dataclass(frozen=True, slots=True, eq=False)
class Int8GemmPlan:
    """Constants of `gemm_int8`; made once, so compared by identity."""

    W: Packed  # the weight
    X: Blocks  # places of x, blocks of a program's tokens
    WARPS: int  # of a program
    ROW_GROUPS: int  # warpgroups side by side, 64 rows each
    # warpgroups that share rows and tokens: they take steps in turn and leave terms in shared
    # memory, which all add
    SLICES: int
    STEPS: int  # of 128 k, of a warpgroup's turn of the loop
    CHUNK: int  # tokens of a product
    SETS: int  # of integer sums: 2 where one is multiplied while the other is converted
    RING: int  # turns of x that are on their way or in use
    STAGE: int  # bytes of a step of x in shared memory
    AHEAD: int  # steps of words that a lane has in flight, a multiple of STEPS
    SLOT: int  # bytes of a warp's words and scales of a step
    PAIRED: bool  # whether rows are those of gate and up in turn
    NORMED: bool  # whether each token has a factor
    SHARED: int  # bytes of shared memory


@cache
def int8_gemm_plan(
    W: Packed, X: Blocks, launch: Int8Launch, paired: bool, normed: bool
) -> Int8GemmPlan:
    """Constants for a weight and blocks of tokens.

    Raises:
        ValueError: a program has no room for two turns of x.
    """
    shared = int8_shared(W.BITS, X.STEPS, X.GROUP, W.SCALES == "fp32", launch)
    if shared is None:
        raise ValueError(f"no room for two turns of x: {launch}")
    return Int8GemmPlan(
        W, X, launch.warps, launch.row_groups, launch.slices, launch.steps, launch.chunk,
        launch.sets, shared.ring, shared.stage, launch.ahead * launch.steps, shared.slot, paired,
        normed, large_size(shared.size),
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "N", "tiles", "units", "blocks", "stride_added"])
def _gemm_int8_kernel(
    x_ptr, words_ptr, scales_ptr, added_ptr, out_ptr, M, N, tiles, units, blocks, stride_added,
    PLAN: gl.constexpr,
):  # fmt: skip
    """N: columns of the output; blocks: of tokens; stride_added: from row to row of `added`."""
    X: gl.constexpr = PLAN.X
    SLICES: gl.constexpr = PLAN.SLICES
    WARPS: gl.constexpr = PLAN.WARPS
    STEPS: gl.constexpr = PLAN.STEPS
    AHEAD: gl.constexpr = PLAN.AHEAD
    SLOT: gl.constexpr = PLAN.SLOT
    RING: gl.constexpr = PLAN.RING
    EACH: gl.constexpr = SLICES * STEPS  # steps of a turn
    TURN: gl.constexpr = EACH * PLAN.STAGE
    TURNS: gl.constexpr = X.STEPS // EACH
    AHEAD_TURNS: gl.constexpr = AHEAD // STEPS
    COLUMNS: gl.constexpr = X.TOKENS
    OWN: gl.constexpr = max(COLUMNS // SLICES, 8)  # of a warpgroup's sums
    TERMS: gl.constexpr = EACH * (128 // X.GROUP) * COLUMNS * 256  # bytes of a turn's
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = (large_shared_buffer(tiles < 0, PLAN.SHARED, WARPS) + zero + 1023) & -1024
    full = buffer + RING * TURN
    empty = full + RING * 8
    ring = empty + RING * 8
    group = warp // (4 * SLICES)
    slice_ = warp // 4 % SLICES
    terms = ring + WARPS * AHEAD * SLOT + group * (2 * TERMS) + warp % 4 * 512 + lane * 16
    ring += warp * (AHEAD * SLOT)
    leads = (warp == 0) & (lane == 0)
    gdc_launch_dependents()
    init_barriers(full, leads, RING)
    _init_counters(empty, leads, RING, WARPS)
    barrier()
    programs = gl.num_programs(0)
    first = gl.program_id(0) + zero
    rounds = (units - gl.program_id(0) + programs - 1) // programs
    tile, words, scales = _place_of(first, blocks, warp, lane, tiles, words_ptr, scales_ptr, PLAN)
    step = slice_ * STEPS
    for i in gl.static_range(AHEAD):
        begun = step + (i // STEPS * EACH + i % STEPS)
        _begin_words(ring + i * SLOT, lane, words, scales, begun, lane >= 0, PLAN)
    stride = (blocks + zero).to(gl.int64) * X.SIZE
    source = x_ptr.to(gl.int64, bitcast=True) + (first % blocks).to(gl.int64) * X.SIZE
    gdc_wait()
    for i in gl.static_range(RING):
        begin_turn(
            buffer + i * TURN, source + stride * (i * EACH), stride, full + i * 8, leads, empty,
            zero, False, PLAN,
        )  # fmt: skip
    source += stride * (RING * EACH)  # of the turn that is copied next
    own_token = gl.minimum(slice_ * OWN, COLUMNS - OWN)  # the first of its tokens
    acc = zeros(zero_f32, OWN // 2)
    slot = rounds * 0
    phase = rounds * 0
    slot_before = rounds * 0  # the slot of the turn before, and its phase
    phase_before = rounds * 0
    place = rounds * 0  # of the turn's words in the ring
    for round in range(rounds):
        unit = first + round * programs
        has_next = unit + programs < units
        next_unit = gl.minimum(unit + programs, units - 1)
        next_tile, next_words, next_scales = _place_of(
            next_unit, blocks, warp, lane, tiles, words_ptr, scales_ptr, PLAN
        )
        next_source = x_ptr.to(gl.int64, bitcast=True) + (next_unit % blocks).to(gl.int64) * X.SIZE
        if RING == TURNS:  # the first copy of this loop would begin the unit after this one
            source = gl.where(round > 0, source, next_source)
        for turn in range(TURNS):
            at = buffer + slot * TURN
            here = ring + place * SLOT
            tokens = _descriptor_word(at + slice_ * (STEPS * PLAN.STAGE))
            if SLICES == 1:
                acc = multiply_scaled(
                    acc, here + lane * 16, here + lane * 4, tokens,
                    at + X.SCALES + lane % 4 * 8, full + slot * 8, phase + zero, PLAN,
                )  # fmt: skip
            else:
                turn_terms = terms + (round * TURNS + turn) % 2 * TERMS
                leave_scaled(
                    here + lane * 16, here + lane * 4, tokens,
                    turn_terms + slice_ * (TERMS // SLICES), full + slot * 8, phase + zero, COLUMNS,
                    PLAN,
                )  # fmt: skip
            inside = turn + AHEAD_TURNS < TURNS
            to = gl.where(inside, turn + AHEAD_TURNS, turn + AHEAD_TURNS - TURNS)
            for i in gl.static_range(STEPS):
                _begin_words(
                    here + i * SLOT, lane, gl.where(inside, words, next_words),
                    gl.where(inside, scales, next_scales), step + (to * EACH + i),
                    (lane >= 0) & (inside | has_next), PLAN,
                )  # fmt: skip
            place = gl.where(place + STEPS == AHEAD, 0, place + STEPS)
            if SLICES > 1:
                barrier()
                acc = add_terms(
                    acc, turn_terms + own_token * 256,
                    at + X.SCALES + (own_token + lane % 4 * 2) * 4, COLUMNS, PLAN,
                )  # fmt: skip
            _arrive(empty + slot * 8, lane == 0)
            # The slot that all have left is filled with what follows: of this unit, or the next.
            copied = turn - 1 + RING
            wanted = (round + turn > 0) & ((copied < TURNS) | has_next)
            begin_turn(
                buffer + slot_before * TURN, source, stride, full + slot_before * 8, leads & wanted,
                empty + slot_before * 8, phase_before + zero, True, PLAN,
            )  # fmt: skip
            following = gl.where(copied + 1 == TURNS, next_source, source + stride * EACH)
            source = gl.where(round + turn > 0, following, source)
            slot_before = slot
            phase_before = phase
            slot, phase = next_slot(slot, phase, RING)
        first_token = unit % blocks * X.TOKENS + own_token
        factors = ()
        for i in gl.static_range(OWN // 8 if PLAN.NORMED else 0):
            row = first_token + (i * 8 + lane % 4 * 2)
            factors = factors + (factor_pair(x_ptr, blocks, row, X),)
        if SLICES * OWN > COLUMNS:  # others have the same sums
            first_token = gl.where(slice_ * OWN < COLUMNS, first_token, M)
        store_block(
            acc, added_ptr, out_ptr, first_token, tile, lane, M, N, stride_added, factors, PLAN
        )  # fmt: skip
        acc = zeros(zero_f32, OWN // 2)
        tile = next_tile
        words = next_words
        scales = next_scales


@gluon.jit
def _descriptor_word(address):
    """The lower word of `ptx.wgmma.descriptor` for rows of 128 bytes."""
    return (address & 0x3FFFF) >> 4 | 0x10000


@gluon.jit
def _place_of(unit, blocks, warp, lane, tiles, words_ptr, scales_ptr, PLAN: gl.constexpr):
    """A warp's tile in a unit, and addresses of its words and scales; past the end the last's."""
    W: gl.constexpr = PLAN.W
    ROW_WORDS: gl.constexpr = 2 if W.SCALES == "fp32" else 1
    TILE_BYTES: gl.constexpr = PLAN.X.STEPS * (256 * W.BITS)  # rows are padded to whole steps
    tile = (unit // blocks * PLAN.ROW_GROUPS + warp // (4 * PLAN.SLICES)) * 4 + warp % 4
    own = gl.minimum(tile, tiles - 1)
    words = words_ptr.to(gl.int64, bitcast=True) + lane * 16 + own.to(gl.int64) * TILE_BYTES
    row = own * (W.GROUPS * 8) + lane // 4
    scales = scales_ptr.to(gl.int64, bitcast=True) + row.to(gl.int64) * (4 * ROW_WORDS)
    return tile, words, scales


@gluon.jit
def _begin_words(slot, lane, words, scales, step, wanted, PLAN: gl.constexpr):
    """Begin to copy a lane's words of a step and its rows' scales, one batch."""
    W: gl.constexpr = PLAN.W
    OWN: gl.constexpr = 128 // W.CODEC.STEP_K  # of the weight's own steps
    GROUPS: gl.constexpr = 128 // PLAN.X.GROUP
    ROW_WORDS: gl.constexpr = 2 if W.SCALES == "fp32" else 1
    for j in gl.static_range(OWN):
        at = words + gl.minimum(step * OWN + j, W.STEPS - 1) * W.CODEC.STEP_BYTES
        copy16_or_zeros(slot + lane * 16, at, wanted, j * 1024)
        copy16_or_zeros(slot + lane * 16, at, wanted, j * 1024 + 512, 512)
    for j in gl.static_range(GROUPS):
        group = gl.minimum((step * 128 + j * PLAN.X.GROUP) // W.G, W.GROUPS - 1)
        at = scales + group * (32 * ROW_WORDS)
        for i in gl.static_range(ROW_WORDS):
            copy4(slot + lane * 4, at, 4 * i, 1024 * OWN + 128 * (j * ROW_WORDS + i))
    commit_copies()


@gluon.jit
def _init_counters(address, leads, COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers of 8 bytes each, which complete after ARRIVALS arrivals."""
    CODE: gl.constexpr = (
        "{.reg .pred p; setp.ne.s32 p, $2, 0; "
        f"@p mbarrier.init.shared::cta.b64 [$1], {ARRIVALS}; mov.b32 $0, 0;}}"
    )
    for i in gl.static_range(COUNT):
        inline(CODE, "=r,r,r", (address + 8 * i, leads.to(gl.int32)))


@gluon.jit
def _arrive(address, inside):
    """Arrive at an mbarrier, once for each lane that is inside."""
    inline(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; "
        "@p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0;}",
        "=r,r,r", (address, inside.to(gl.int32)),
    )  # fmt: skip


def multiply(
    blocks: Tensor,
    M: int,
    w: TiledLinear,
    X: Blocks,
    launch: Int8Launch,
    *,
    normed: bool = False,
    added: Tensor | None = None,
) -> Tensor:
    """The product of a weight and tokens that `quantize` has left in blocks; see `gemm_int8`.

    normed: their norm's factors are behind them.
    """
    plan = int8_gemm_plan(w.constants, X, launch, w.paired, normed)
    N = w.N // 2 if w.paired else w.N
    y = torch.empty((M, N), dtype=torch.bfloat16, device=blocks.device)
    count = -(-M // X.TOKENS)
    units = -(-w.tiles * TILE // (ROWS * launch.row_groups)) * count
    run(
        _gemm_int8_kernel,
        (min(units, launch.programs * card_of(blocks).multiprocessors),),
        blocks,
        w.words,
        w.scales.view(torch.int32),
        None if added is None else added.view(torch.int32),
        y.view(torch.int32),
        M,
        N,
        w.tiles,
        units,
        count,
        0 if added is None or added.shape[0] == 1 else N,
        PLAN=plan,
        num_warps=launch.warps,
        maxnreg=min(255, 2048 // (launch.warps * launch.programs) // 8 * 8),
        launch_pdl=True,
        enable_fp_fusion=True,
    )
    return y


def gemm_int8(
    x: Tensor,
    w: TiledLinear,
    launch: Int8Launch,
    *,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
) -> Tensor:
    """`added + rms_norm(x) @ w.T` with x in eight bits, on Hopper; see `launch.choose`.

    Args:
        x: [M, K] bfloat16, contiguous.
        w: [N, K]; of a paired one `silu(gate) * up`, without `added`.
        launch: of `launch.int8`.
        norm: [K] gain of an RMS norm.
        squares: of the heads of x, whose norm takes the place of `norm`; see `gemv`.
        added: [M, N] or [1, N], added in FP32 before the one rounding.

    Returns:
        [M, N] or [M, N / 2] bfloat16.
    """
    X = token_blocks(w.K, activation_group(w.group_size, w.K), launch.tokens)
    blocks = quantize(x, w.bits, X, norm=norm, squares=squares, eps=eps)
    return multiply(blocks, len(x), w, X, launch, normed=norm is not None, added=added)
