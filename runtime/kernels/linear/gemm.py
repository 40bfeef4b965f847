"""gemm: y = x @ w.T + added of many tokens on Hopper, with codes widened in registers.

    w[n, k] = bf16(scale[n, k / G] * code[n, k])                 (one rounding, as `widen` does it)

or silu(gate) * up of such a product, where the weight is paired.

Layout  weight in tiles of 16 rows as `gemv` reads them (`tiles`): four tiles are the 64 rows of a
        warpgroup's A operand, in registers. x as `arrange` leaves it: for every 64 k all tokens,
        128 bytes each, in wgmma's swizzle, so that the tokens of a program are one bulk copy, the B
        operand. y [M, N] bf16, or [M, N / 2] where paired
Bytes   N*K*bits/8 + 2*N*K/G for each block of tokens, 2*M*K for each block of rows, 2*M*N written
Plan    a program takes a block of 128 rows and TOKENS tokens after the other. x passes through a
        ring in shared memory; each lane loads its own words two steps ahead, and widens those of
        the next 64 k while the tensor cores multiply. Two warpgroups, 64 rows each, take turns.
        Where blocks would leave multiprocessors without work they are split along K among programs
        that run side by side: each adds the sums of all for its share of the tokens, in order
Bits    a token's sums are over k in one order, whatever its place; that order is the same for all
        numbers of tokens that have as many splits
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import card_of, run
from lowbit.runtime.kernels.launch.linear import gemm_share
from lowbit.runtime.kernels.linear.gemm_store import WARPS, joined, store_block
from lowbit.runtime.kernels.linear.program import Packed
from lowbit.runtime.kernels.linear.tiles import TILE, TiledLinear
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    count_shared,
    large_shared_buffer,
    large_size,
    store_shared4,
    stream8,
    stream16,
)
from lowbit.runtime.kernels.ptx.mma import (
    inline,
    threads,
    zeros,
)
from lowbit.runtime.kernels.ptx.wgmma import (
    bulk_copy,
    descriptor,
    expect_bytes,
    init_barriers,
    multiply_widened,
    next_slot,
    settled,
    wait_phase,
    widened,
)

STEP_K = gl.constexpr(128)  # of a stage: two blocks of 128 bytes of x, the width of the swizzle
ROWS = 128  # of a program
STAGES = {64: 12, 128: 6, 192: 4, 256: 3}  # steps of x in shared memory, by tokens of a program
REGISTERS = 255  # of a thread


@dataclass(frozen=True, slots=True, eq=False)
class GemmPlan:
    """Constants of `gemm`; made once, so compared by identity."""

    W: Packed  # the weight
    TOKENS: int  # of a program, one of STAGES
    STAGES: int  # steps of x that are on their way or in use
    STEPS: int  # of 128 k, the last perhaps beyond K
    SPLITS: int  # of a block's steps, a program's each
    PAIRED: bool  # whether rows are those of gate and up in turn
    SHARED: int  # bytes of shared memory


def steps_of(K: int) -> int:
    """Steps of so many columns."""
    steps: int = -(-K // STEP_K.value)
    return steps


@cache
def gemm_plan(W: Packed, tokens: int, splits: int, paired: bool) -> GemmPlan:
    """Constants for blocks of so many tokens in so many splits."""
    steps = steps_of(W.K)
    stages = min(STAGES[tokens], steps // splits + 1)  # so that they reach into one more unit only
    shared = large_size(1024 + stages * (tokens * 256 + 16))
    return GemmPlan(W, tokens, stages, steps, splits, paired, shared)


@triton.jit
def _arrange_kernel(
    x_ptr, gain_ptr, out_ptr, counts_ptr, K, rows, eps,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """A program takes a token. PAIRS: of K and its padding; COUNTS: that it sets to zero."""
    token = tl.program_id(0).to(tl.int64)
    gdc_launch_dependents()
    at = tl.arange(0, BLOCK // 2)  # pairs, where they go
    in_block = at % 16
    source = at // 16 * 16 + in_block % 4 * 4 + in_block // 8 * 2 + in_block // 4 % 2
    inside = 2 * source < K
    if gain_ptr is not None:
        even_gain = tl.load(gain_ptr + 2 * source, mask=inside, other=0.0).to(tl.float32)
        odd_gain = tl.load(gain_ptr + 2 * source + 1, mask=inside, other=0.0).to(tl.float32)
    gdc_wait()
    if counts_ptr is not None:
        tl.store(counts_ptr + token * COUNTS + tl.arange(0, COUNTS), 0)
    x_ptr += token * K
    factor = 1.0
    if gain_ptr is not None:
        offs = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < K, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
    even = tl.load(x_ptr + 2 * source, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + 2 * source + 1, mask=inside, other=0.0).to(tl.float32)
    if gain_ptr is not None:
        even *= factor * even_gain
        odd *= factor * odd_gain
    low = even.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = odd.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    word = (low | (high << 16)).to(tl.int32, bitcast=True)
    chunk = (at % 32 // 4) ^ (token % 8).to(tl.int32)
    out = out_ptr + ((at // 32).to(tl.int64) * rows + token) * 32 + chunk * 4 + at % 4
    tl.store(out, word, mask=at < PAIRS)


def arrange(
    x: Tensor,
    steps: int,
    tokens: int,
    norm: Tensor | None = None,
    eps: float = 0.0,
    counts: Tensor | None = None,
) -> Tensor:
    """Tokens as `gemm` reads them: [2 * steps, rows, 32] int32, padded with anything.

    In every 32 k pairs (t, j, h) of neighbours have become pairs (j, h, t): of the chunk of 8 k
    that lane t holds of a row's codes, the products j = 0, 1 take two pairs h each.

    Args:
        x: [M, K] bfloat16, contiguous.
        steps: of 128 k; what is past K becomes zeros.
        tokens: of a program, of which rows are a multiple.
        norm: [K] gain of an RMS norm.
        counts: [M, C] int32, C a power of two, which become zeros.
    """
    M, K = x.shape
    rows = -(-M // tokens) * tokens
    out = torch.empty((2 * steps, rows, 32), dtype=torch.int32, device=x.device)
    pairs = steps * 64
    run(
        _arrange_kernel,
        (M,),
        x,
        norm,
        out,
        counts,
        K,
        rows,
        eps,
        BLOCK=triton.next_power_of_2(2 * pairs),
        PAIRS=pairs,
        COUNTS=1 if counts is None else counts.shape[1],
        num_warps=8,
        launch_pdl=True,
        enable_fp_fusion=True,
    )
    return out


@gluon.jit(do_not_specialize=["M", "N", "rows", "tiles", "units", "token_blocks", "stride"])
def _gemm_kernel(
    x_ptr, words_ptr, scales_ptr, added_ptr, out_ptr, parts_ptr, counts_ptr, M, N, rows, tiles,
    units, token_blocks, stride, PLAN: gl.constexpr,
):  # fmt: skip
    """N: columns of the output; rows: of x, padded; stride: from row to row of what is added.

    units: splits of all blocks.
    """
    W: gl.constexpr = PLAN.W
    TOKENS: gl.constexpr = PLAN.TOKENS
    STEPS: gl.constexpr = PLAN.STEPS // PLAN.SPLITS
    STAGES: gl.constexpr = PLAN.STAGES
    STAGE: gl.constexpr = TOKENS * 256
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = (large_shared_buffer(tiles < 0, PLAN.SHARED, WARPS) + zero + 1023) & -1024
    full = buffer + STAGES * STAGE
    counts = full + STAGES * 8  # of warps that have read a stage
    leads = (warp == 0) & (lane == 0)
    gdc_launch_dependents()
    init_barriers(full, leads, STAGES)
    for i in gl.static_range(STAGES):
        store_shared4(counts + i * 4, zero_f32, leads)
    barrier()
    programs = gl.num_programs(0)
    turns = (units - gl.program_id(0) + programs - 1) // programs
    block, first = _share_of(gl.program_id(0), PLAN)
    row = _row_of(block, first, rows, token_blocks, PLAN)
    next_block, next_first = _share_of(gl.program_id(0) + programs, PLAN)
    next_row = _row_of(next_block, next_first, rows, token_blocks, PLAN) - STEPS * 2 * rows
    more = gl.program_id(0) + programs < units
    words, scales = _place_of(block, token_blocks, warp, lane, tiles, words_ptr, scales_ptr, W)
    now = _load_step(words, scales, first, W)
    then = _load_step(words, scales, first + 1, W)
    gdc_wait()
    for i in gl.static_range(STAGES):
        wanted, at = _ahead(i, STEPS, row, next_row, more, rows)
        _begin_stage(x_ptr, buffer + i * STAGE, full + i * 8, leads & wanted, at, rows, PLAN)
    a = widened(now, W.BITS)
    acc = zeros(zero_f32, TOKENS // 2)
    stage = turns * 0
    slot = turns * 0
    phase = turns * 0
    left = turns * 0
    for turn in range(turns):
        unit = gl.program_id(0) + turn * programs
        block, first = _share_of(unit, PLAN)
        row = _row_of(block, first, rows, token_blocks, PLAN)
        more = unit + programs < units
        next_block, next_first = _share_of(unit + programs, PLAN)
        next_row = _row_of(next_block, next_first, rows, token_blocks, PLAN) - STEPS * 2 * rows
        next_words, next_scales = _place_of(
            next_block, token_blocks, warp, lane, tiles, words_ptr, scales_ptr, W
        )
        for step in range(STEPS):
            here = step + 2 < STEPS
            later = _load_step(
                gl.where(here, words, next_words), gl.where(here, scales, next_scales),
                gl.where(here, first + step + 2, next_first + step + 2 - STEPS), W,
            )  # fmt: skip
            wait_phase(full + slot * 8, phase)
            acc, a = multiply_widened(
                acc, a, now, then, descriptor(buffer + slot * STAGE, 128), zero + (step > 0),
                TOKENS, W.BITS,
            )  # fmt: skip
            if stage > 0:  # the product of the stage before this one is done
                last = count_shared(counts + left * 4, WARPS - 1, lane == 0) == WARPS - 1
                wanted, at = _ahead(step - 1 + STAGES, STEPS, row, next_row, more, rows)
                _begin_stage(
                    x_ptr, buffer + left * STAGE, full + left * 8, (lane == 0) & last & wanted, at,
                    rows, PLAN,
                )  # fmt: skip
            left = slot
            slot, phase = next_slot(slot, phase, STAGES)
            stage += 1
            now = then
            then = later
        acc = settled(acc)
        first_token = block % token_blocks * TOKENS
        tile = block // token_blocks * WARPS + warp
        if PLAN.SPLITS > 1:
            acc, own = joined(acc, parts_ptr, counts_ptr, unit, warp, lane, PLAN)
            first_token += own
        store_block(acc, added_ptr, (), out_ptr, first_token, tile, lane, M, N, stride, (), PLAN)
        acc = zeros(zero_f32, TOKENS // 2)  # so that joined sums find the registers of these free
        words = next_words
        scales = next_scales


@gluon.jit
def _begin_stage(x_ptr, target, barrier, leads, row, rows, PLAN: gl.constexpr):
    """Begin to copy a step's x from this row on: its blocks of 64 k, one after the other."""
    BLOCK: gl.constexpr = PLAN.TOKENS * 128
    x = x_ptr.to(gl.int64, bitcast=True) + target.to(gl.int64) * 0
    expect_bytes(barrier, leads, 2 * BLOCK)
    for i in gl.static_range(2):
        source = x + (row + i * rows).to(gl.int64) * 128
        bulk_copy(target + i * BLOCK, source, barrier, leads, BLOCK)


@gluon.jit
def _share_of(unit, PLAN: gl.constexpr):
    return unit // PLAN.SPLITS, unit % PLAN.SPLITS * (PLAN.STEPS // PLAN.SPLITS)


@gluon.jit
def _row_of(block, first, rows, token_blocks, PLAN: gl.constexpr):
    return first * 2 * rows + block % token_blocks * PLAN.TOKENS


@gluon.jit
def _ahead(step, steps, row, next_row, more, rows):
    """True if there is such a step, and its first row in x.

    row, next_row: the row of step 0, of the unit and of the next, whose steps are counted on; more:
    there is a next unit.
    """
    here = step < steps
    return here | more, gl.where(here, row, next_row) + step * 2 * rows


@gluon.jit
def _place_of(
    block, token_blocks, warp, lane, tiles, words_ptr, scales_ptr, W: gl.constexpr
):  # fmt: skip
    """Addresses of words and scales of a warp's tile in a block; past the end the last tile's."""
    own = gl.minimum(block // token_blocks * WARPS + warp, tiles - 1)
    TILE_BYTES: gl.constexpr = W.STEPS * W.CODEC.STEP_BYTES
    words = words_ptr.to(gl.int64, bitcast=True) + lane * 16 + own.to(gl.int64) * TILE_BYTES
    row = own * (W.GROUPS * 8) + lane // 4
    scales = scales_ptr.to(gl.int64, bitcast=True) + row.to(gl.int64) * 4
    return words, scales


@gluon.jit
def _load_step(words, scales, step, W: gl.constexpr):
    """A lane's words of 128 k, as `widened` takes them."""
    low = ()
    high = ()
    if W.CODEC.STEP_K <= STEP_K:
        COUNT: gl.constexpr = STEP_K // W.CODEC.STEP_K  # of the weight's own steps
        for i in gl.static_range(COUNT):
            at = words + gl.minimum(step * COUNT + i, W.STEPS - 1) * W.CODEC.STEP_BYTES
            low = low + stream16(at)
            high = high + stream16(at, 512)
    else:  # half of one
        at = words + gl.minimum(step // 2, W.STEPS - 1) * W.CODEC.STEP_BYTES + step % 2 * 8
        if W.CODEC.SPANS:
            for i in gl.static_range(3):
                both = stream8(at, 512 * i)
                low = low + (both[0],)
                high = high + (both[1],)
        else:
            low = stream8(at)
            high = stream8(at, 512)
    factors = ()
    if W.G % STEP_K == 0:
        raw = _load_word(scales + step * STEP_K // W.G * 32)
        factors = (raw, raw, raw, raw)
    else:
        for q in gl.static_range(4):
            group = gl.minimum((step * STEP_K + q * 32) // W.G, W.GROUPS - 1)
            factors = factors + (_load_word(scales + group * 32),)
    return low, high, factors


@gluon.jit
def _load_word(address):
    return inline("ld.global.b32 $0, [$1];", "=r,l", (address,))


def gemm(
    x: Tensor,
    w: TiledLinear,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
) -> Tensor:
    """`added + rms_norm(x) @ w.T` of many tokens, on Hopper; see `launch.choose`.

    Args:
        x: [M, K] bfloat16, contiguous.
        w: [N, K]; of a paired one `silu(gate) * up`, without `added`.
        norm: [K] gain of an RMS norm.
        added: [M, N] or [1, N], added in FP32 before the one rounding.

    Returns:
        [M, N] or [M, N / 2] bfloat16.
    """
    M = x.shape[0]
    row_blocks = -(-w.tiles * TILE // ROWS)
    count = card_of(x).multiprocessors
    share = gemm_share(row_blocks, M, steps_of(w.K), count)
    plan = gemm_plan(w.constants, share.tokens, share.splits, w.paired)
    token_blocks = -(-M // share.tokens)
    parts = counts = None
    units = row_blocks * token_blocks * share.splits
    if share.splits > 1:
        each = triton.next_power_of_2(-(-row_blocks * token_blocks * WARPS.value // M))
        counts = x.new_empty((M, each), dtype=torch.int32)
        parts = x.new_empty((units, ROWS, share.tokens), dtype=torch.float32)
    arranged = arrange(x, plan.STEPS, share.tokens, norm, eps, counts)
    N = w.N // 2 if w.paired else w.N
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    run(
        _gemm_kernel,
        (min(units, count),),
        arranged,
        w.words,
        w.scales.view(torch.int32),
        None if added is None else added.view(torch.int32),
        y.view(torch.int32),
        parts,
        counts,
        M,
        N,
        arranged.shape[1],
        w.tiles,
        units,
        token_blocks,
        0 if added is None or added.shape[0] == 1 else N,
        PLAN=plan,
        num_warps=WARPS.value,
        maxnreg=REGISTERS,
        launch_pdl=True,
        enable_fp_fusion=True,
    )
    return y
