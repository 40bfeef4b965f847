"""gemm_int8: y = added + x @ w.T on Hopper, x in eight bits, where `stream_int8` has no launch.

    y[m, n] = sum_g s_x[m, g] * (s_w[n, g] * sum_k code[n, k] * q[m, k])     groups g in any order

or silu(gate) * up of such a product, where the weight is paired; see `formats.activations`.

Layout  weight in tiles of 16 rows as `gemv` reads them (`tiles`): four tiles are the 64 rows of a
        warpgroup's A operand, in registers. x as `quantize` leaves it: a block's tokens of 128 k
        and their scales are one bulk copy. y [M, N], or [M, N / 2] where paired, bf16 or fp32
Bytes   N*K*bits/8 + 2*N*K/G for each block of tokens, M*K*(1 + 4/128) for each block of rows,
        2*M*N written, 4*M*N as FP32; where K is divided, 8*rows*tokens for each part of a block
Plan    a unit is a block of rows and of tokens. Every program has as many whole units; of those
        that are left each is divided along K among some programs, which begin with their parts. A
        part waits in memory for the warp that comes last, which adds all parts and stores. x and
        the words pass through rings in shared memory: x by bulk copies, which one warp begins, each
        lane's words by copies of its own
Bits    sums begin at a centre and are exact after each term's own rounding, so a token's results
        depend on nothing but the token: neither on tile nor on company nor on shares. Sums with
        integer scales are integers until they are whole
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
from lowbit.runtime.kernels.launch.int8 import COUNTERS, ROWS, Int8Launch, int8_shared
from lowbit.runtime.kernels.linear.gemm_store import load_added, store_block
from lowbit.runtime.kernels.linear.program import Blocks, Packed, token_blocks
from lowbit.runtime.kernels.linear.quantize import bound_pair, factor_pair, quantize
from lowbit.runtime.kernels.linear.sums import centre_of, number_of, row_numbers, scaled
from lowbit.runtime.kernels.linear.tiles import TILE, TiledLinear
from lowbit.runtime.kernels.ptx.int8 import begin_turn, multiply_scaled
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    commit_copies,
    copy4,
    copy16_or_zeros,
    count_warp,
    large_shared_buffer,
    large_size,
    store16,
    stream16_if,
)
from lowbit.runtime.kernels.ptx.mma import as_word, threads
from lowbit.runtime.kernels.ptx.wgmma import arrive, init_barriers, init_counters, next_slot

# Tokens of a block up to which a lane has registers for what it needs behind its products: factors
# come before them, what is added before parts are joined.
EARLY_FACTORS = gl.constexpr(32)
EARLY_ADDED = gl.constexpr(64)


@dataclass(frozen=True, slots=True, eq=False)
class Int8GemmPlan:
    """Constants of `gemm_int8`; made once, so compared by identity."""

    W: Packed  # the weight
    X: Blocks  # places of x, blocks of a program's tokens
    WARPS: int  # of a program
    ROW_GROUPS: int  # warpgroups side by side, 64 rows each
    STEPS: int  # of 128 k, of a warpgroup's turn of the loop
    CHUNK: int  # tokens of a product
    SETS: int  # of integer sums: 2 where one is multiplied while the other is converted
    RING: int  # turns of x that are on their way or in use
    STAGE: int  # bytes of a step of x in shared memory
    AHEAD: int  # steps of words that a lane has in flight, a multiple of STEPS
    SLOT: int  # bytes of a warp's words and scales of a step
    PAIRED: bool  # whether rows are those of gate and up in turn
    NORMED: bool  # whether each token has a factor
    SUMMED: bool  # whether two rows of x are a token; see `remainders`
    DIVIDED: bool  # whether programs divide units among themselves
    SHARED: int  # bytes of shared memory


@cache
def int8_gemm_plan(
    W: Packed, X: Blocks, launch: Int8Launch, paired: bool, normed: bool, summed: bool = False
) -> Int8GemmPlan:
    """Constants for a weight and blocks of tokens.

    Raises:
        ValueError: a program has no room for two turns of x.
    """
    shared = int8_shared(W.BITS, X.STEPS, X.GROUP, W.SCALES == "fp32", launch, X.WHOLE)
    if shared is None:
        raise ValueError(f"no room for two turns of x: {launch}")
    return Int8GemmPlan(
        W, X, launch.warps, launch.row_groups, launch.steps, launch.chunk, launch.sets,
        shared.ring, shared.stage, launch.ahead * launch.steps, shared.slot, paired, normed,
        summed, launch.sharers > 1, large_size(shared.size),
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "M", "N", "tiles", "units", "blocks", "stride_added", "divided", "sharers",
    ],
)  # fmt: skip
def _gemm_int8_kernel(
    x_ptr, words_ptr, scales_ptr, rows_ptr, added_ptr, out_ptr, parts_ptr, counts_ptr, M, N,
    tiles, units, blocks, stride_added, divided, sharers, PLAN: gl.constexpr,
):  # fmt: skip
    """N: columns of the output; blocks: of tokens; stride_added: from row to row of `added`.

    divided: units, the first ones, each of which `sharers` programs divide.
    """
    X: gl.constexpr = PLAN.X
    WARPS: gl.constexpr = PLAN.WARPS
    STEPS: gl.constexpr = PLAN.STEPS
    AHEAD: gl.constexpr = PLAN.AHEAD
    SLOT: gl.constexpr = PLAN.SLOT
    RING: gl.constexpr = PLAN.RING
    TURN: gl.constexpr = STEPS * PLAN.STAGE
    TURNS: gl.constexpr = X.STEPS // STEPS
    AHEAD_TURNS: gl.constexpr = AHEAD // STEPS
    COLUMNS: gl.constexpr = X.TOKENS
    warp, lane, zero, _ = threads(WARPS)
    buffer = (large_shared_buffer(tiles < 0, PLAN.SHARED, WARPS) + zero + 1023) & -1024
    full = buffer + RING * TURN
    empty = full + RING * 8
    ring = empty + RING * 8 + warp * (AHEAD * SLOT)
    leads = (warp == 0) & (lane == 0)
    gdc_launch_dependents()
    init_barriers(full, leads, RING)
    init_counters(empty, leads, RING, WARPS)
    barrier()
    programs = gl.num_programs(0)
    first, start, limit, shares = _part_of(gl.program_id(0), divided, sharers, PLAN)
    whole = divided + gl.program_id(0)  # the first whole unit
    rounds = shares + (units - whole + programs - 1) // programs
    count = limit - start + (rounds - 1) * TURNS  # turns of the program
    second = gl.minimum(gl.where(shares > 0, whole, whole + programs), units - 1)
    tile, words, scales = _place_of(
        first + zero, blocks, warp, lane, tiles, words_ptr, scales_ptr, PLAN
    )
    next_place = _place_of(second + zero, blocks, warp, lane, tiles, words_ptr, scales_ptr, PLAN)
    for i in gl.static_range(AHEAD):
        turn = start + i // STEPS
        inside = turn < limit
        _begin_words(
            ring + i * SLOT, lane, gl.where(inside, words, next_place[1]),
            gl.where(inside, scales, next_place[2]),
            gl.where(inside, turn, turn - limit) * STEPS + i % STEPS + zero,
            (lane >= 0) & (i // STEPS < count), PLAN,
        )  # fmt: skip
    x = x_ptr.to(gl.int64, bitcast=True) + zero.to(gl.int64)
    stride = (blocks + zero).to(gl.int64) * X.SIZE  # from step to step
    here = x + (first % blocks).to(gl.int64) * X.SIZE
    there = x + (second % blocks).to(gl.int64) * X.SIZE
    gdc_wait()
    for i in gl.static_range(RING):
        begin_turn(
            buffer + i * TURN, _source_of(here, there, start + i, limit, stride, PLAN), stride,
            full + i * 8, leads & (i < count), empty, zero, False, PLAN,
        )  # fmt: skip
    slot = start * 0
    phase = start * 0
    slot_before = start * 0  # the slot of the turn before, and its phase
    phase_before = start * 0
    place = start * 0  # of the turn's words in the ring
    done = start * 0  # turns of this program
    begin = start
    for round in range(rounds):
        following = whole + (round + 1 - shares) * programs
        unit = gl.where(round == 0, first, following - programs)
        next_unit = gl.minimum(following, units - 1)
        next_tile, next_words, next_scales = _place_of(
            next_unit + zero, blocks, warp, lane, tiles, words_ptr, scales_ptr, PLAN
        )
        here = x + (unit % blocks).to(gl.int64) * X.SIZE
        there = x + (next_unit % blocks).to(gl.int64) * X.SIZE
        first_token = unit % blocks * COLUMNS
        rows = row_numbers(rows_ptr, gl.minimum(tile, tiles - 1), lane)
        factors = ()
        if PLAN.NORMED and COLUMNS <= EARLY_FACTORS:
            factors = _factors(x_ptr, blocks, first_token, lane, PLAN)
        acc = ()
        for i in gl.static_range(COLUMNS // 8):
            if X.WHOLE:
                acc = acc + (zero, zero, zero, zero)
            else:
                acc = acc + _centres(x_ptr, blocks, first_token + i * 8, lane, rows, PLAN)
        own = limit - begin  # turns of this unit
        for k in range(own):
            turn = begin + k
            at = buffer + slot * TURN
            mine = ring + place * SLOT
            word = _descriptor_word(at) + lane
            acc = multiply_scaled(
                acc, mine + lane * 16, mine + lane * 4, word,
                at + X.SCALES + lane % 4 * 16, full + slot * 8, phase + zero, PLAN,
            )  # fmt: skip
            inside = turn + AHEAD_TURNS < limit
            to = gl.where(inside, turn + AHEAD_TURNS, turn + AHEAD_TURNS - limit)
            for i in gl.static_range(STEPS):
                _begin_words(
                    mine + i * SLOT, lane, gl.where(inside, words, next_words),
                    gl.where(inside, scales, next_scales), to * STEPS + i + zero,
                    (lane >= 0) & (done + k + AHEAD_TURNS < count), PLAN,
                )  # fmt: skip
            place = gl.where(place + STEPS == AHEAD, 0, place + STEPS)
            arrive(empty + slot * 8, lane == 0)
            # The slot that all have left is filled with what follows: of this unit, or the next.
            wanted = (done + k > 0) & (done + k - 1 + RING < count)
            begin_turn(
                buffer + slot_before * TURN,
                _source_of(here, there, turn - 1 + RING, limit, stride, PLAN), stride,
                full + slot_before * 8, leads & wanted, empty + slot_before * 8,
                phase_before + zero, True, PLAN,
            )  # fmt: skip
            slot_before = slot
            phase_before = phase
            slot, phase = next_slot(slot, phase, RING)
        given = ()
        if added_ptr is not None and COLUMNS <= EARLY_ADDED:
            given = load_added(
                added_ptr, first_token, tile, lane, M, N, stride_added, COLUMNS // 8, PLAN
            )
        if PLAN.NORMED and COLUMNS > EARLY_FACTORS:
            factors = _factors(x_ptr, blocks, first_token, lane, PLAN)
        sums = acc if X.WHOLE else ()
        for i in gl.static_range(0 if X.WHOLE else COLUMNS // 8):
            centre = _centres(x_ptr, blocks, first_token + i * 8, lane, rows, PLAN)
            for j in gl.static_range(4):
                sums = sums + (acc[4 * i + j] - centre[j],)
        if PLAN.DIVIDED:
            part = (round == 0) & (shares > 0)
            sums, last = _join(
                sums, parts_ptr, counts_ptr, unit, blocks, tile, tiles, sharers, warp, lane,
                (lane >= 0) & part, PLAN,
            )  # fmt: skip
            first_token = gl.where(last, first_token, M)  # others have stored nothing
        if X.WHOLE:
            FACTOR: gl.constexpr = PLAN.W.CODEC.FACTOR
            sums = scaled(sums, (rows[0] * FACTOR, rows[1] * FACTOR))
        store_block(
            sums, added_ptr, given, out_ptr, first_token, tile, lane, M, N, stride_added, factors,
            PLAN, PLAN.SUMMED,
        )  # fmt: skip
        done += own
        begin = begin * 0
        limit = begin + TURNS
        tile = next_tile
        words = next_words
        scales = next_scales


@gluon.jit
def _part_of(program, divided, sharers, PLAN: gl.constexpr):
    """A program's first unit, its turns of that: first and end, and whether others share it."""
    TURNS: gl.constexpr = PLAN.X.STEPS // PLAN.STEPS
    if PLAN.DIVIDED:
        shares = program < divided * sharers
        part = program % sharers
        first = gl.where(shares, program // sharers, divided + program)
        start = gl.where(shares, part * TURNS // sharers, 0)
        limit = gl.where(shares, (part + 1) * TURNS // sharers, TURNS)
        found = first, start, limit, shares.to(gl.int32)
    else:
        found = program, program * 0, program * 0 + TURNS, program * 0
    return found


@gluon.jit
def _source_of(here, there, turn, limit, stride, PLAN: gl.constexpr):
    """Address of the x of a turn, of a unit or, past its last one, of the unit that follows."""
    inside = turn < limit
    step = gl.where(inside, turn, turn - limit) * PLAN.STEPS
    return gl.where(inside, here, there) + stride * step


@gluon.jit
def _centres(x_ptr, blocks, token, lane, rows, PLAN: gl.constexpr):
    """Starts of a lane's four sums of eight tokens."""
    X: gl.constexpr = PLAN.X  # Triton 3.6 takes no record from a record as an argument
    pair = bound_pair(x_ptr, blocks, token + lane % 4 * 2, X)
    return (
        centre_of(rows[0], pair[0]), centre_of(rows[0], pair[1]),
        centre_of(rows[1], pair[0]), centre_of(rows[1], pair[1]),
    )  # fmt: skip


@gluon.jit
def _factors(x_ptr, blocks, first_token, lane, PLAN: gl.constexpr):
    """Factors of a lane's two of each eight tokens."""
    X: gl.constexpr = PLAN.X  # Triton 3.6 takes no record from a record as an argument
    factors = ()
    for i in gl.static_range(X.TOKENS // 8):
        row = first_token + (i * 8 + lane % 4 * 2)
        factors = factors + (factor_pair(x_ptr, blocks, row, X),)
    return factors


@gluon.constexpr_function
def _parts_at_once(plan):
    """Parts whose loads are on their way together, as registers allow."""
    return max(1, min(8, 256 // plan.X.TOKENS))


@gluon.jit
def _join(
    sums, parts_ptr, counts_ptr, unit, blocks, tile, tiles, sharers, warp, lane, part,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Leave a part of a unit, or add all parts, in the warp that comes last.

    part: whether the sums are not the whole unit's.

    Returns:
        The sums of the unit and whether the warp has them.
    """
    BYTES: gl.constexpr = PLAN.WARPS * PLAN.X.TOKENS * 64  # of a part
    AT_ONCE: gl.constexpr = _parts_at_once(PLAN)
    zero = lane * 0
    parts = parts_ptr.to(gl.int64, bitcast=True)
    parts += (warp * (PLAN.X.TOKENS * 64) + lane * 16).to(gl.int64)
    at = parts + (gl.program_id(0) + zero).to(gl.int64) * BYTES
    for i in gl.static_range(0, len(sums), 4):
        words = as_word(sums[i]), as_word(sums[i + 1]), as_word(sums[i + 2]), as_word(sums[i + 3])
        store16(at + i * 128, words, part)
    counter = counts_ptr.to(gl.int64, bitcast=True)
    counter += ((tile * blocks + unit % blocks) * 4).to(gl.int64)
    counted = part & (tile < tiles)
    last = counted & (count_warp(counter, sharers - 1 + zero, counted) == sharers - 1)
    total = ()
    for i in gl.static_range(len(sums)):
        total = total + (gl.where(last, number_of(zero, sums[i]), sums[i]),)
    for first in range(0, sharers, AT_ONCE):
        loaded = ()
        for i in gl.static_range(AT_ONCE):
            other = unit * sharers + gl.minimum(first + i, sharers - 1)
            there = parts + (other + zero).to(gl.int64) * BYTES
            for j in gl.static_range(0, len(sums), 4):
                loaded = loaded + stream16_if(there + j * 128, last & (first + i < sharers))
        more = ()
        for j in gl.static_range(len(sums)):
            one = total[j]
            for i in gl.static_range(AT_ONCE):
                one += number_of(loaded[i * len(sums) + j], one)
            more = more + (one,)
        total = more
    return total, last | ~part


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
    tile = (unit // blocks * PLAN.ROW_GROUPS + warp // 4) * 4 + warp % 4
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


def multiply(
    blocks: Tensor,
    M: int,
    w: TiledLinear,
    X: Blocks,
    launch: Int8Launch,
    *,
    normed: bool = False,
    added: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product of a weight and tokens that `quantize` has left in blocks; see `gemm_int8`.

    normed: their norm's factors are behind them.

    Returns:
        [M, N] or [M, N / 2]; where two rows are a token [M / 2, N] float32.
    """
    plan = int8_gemm_plan(w.constants, X, launch, w.paired, normed, w.remainders)
    if w.rows is None or w.arrived is None:
        raise ValueError("a weight that was not prepared for activations in eight bits")
    y = w.new_product(M, dtype)
    count = -(-M // X.TOKENS)
    units = -(-w.tiles * TILE // (ROWS * launch.row_groups)) * count
    programs = min(units, launch.programs * card_of(blocks).multiprocessors)
    divided, parts = 0, None
    if launch.sharers > 1:
        if count > COUNTERS:
            raise ValueError(f"{count} blocks of tokens share counters, at most {COUNTERS}")
        programs = launch.programs * card_of(blocks).multiprocessors
        divided = units % programs
        shares = divided * launch.sharers
        if shares > programs:
            raise ValueError(f"{shares} parts of units for {programs} programs")
        programs = programs if units > divided else shares
        size = shares * launch.row_groups * ROWS * X.TOKENS
        parts = torch.empty(size, dtype=torch.float32, device=blocks.device)
    run(
        _gemm_int8_kernel,
        (programs,),
        blocks,
        w.words,
        w.scales.view(torch.int32),
        w.rows,
        None if added is None else added.view(torch.int32),
        y if dtype == torch.float32 else y.view(torch.int32),
        parts,
        w.arrived,
        M,
        w.outputs,
        w.tiles,
        units,
        count,
        0 if added is None or added.shape[0] == 1 else w.outputs,
        divided,
        launch.sharers,
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
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`added + rms_norm(x) @ w.T` with x in eight bits, on Hopper; see `launch.choose`.

    Args:
        x: [M, K] bfloat16, contiguous.
        w: [N, K]; of a paired one `silu(gate) * up`, without `added`.
        launch: of `launch.int8`.
        norm: [K] gain of an RMS norm.
        squares: of the heads of x, whose norm takes the place of `norm`; see `gemv`.
        added: [M, N] or [1, N] bfloat16, added in FP32 before the one rounding.
        dtype: of the result: bfloat16, or float32, which is not rounded.

    Returns:
        [M, N] or [M, N / 2].
    """
    group = activation_group(w.group_size, w.K)
    X = token_blocks(w.K, group, launch.tokens, sixteens=not w.whole, whole=w.whole)
    blocks = quantize(x, w.bits, X, norm=norm, squares=squares, eps=eps)
    normed = norm is not None
    return multiply(blocks, len(x), w, X, launch, normed=normed, added=added, dtype=dtype)
