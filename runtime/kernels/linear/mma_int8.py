"""mma_int8: the product of `gemv_int8` for more tokens, by `mma.sync`: for cards without `wgmma`.

    t = fp32(sum(code * q) * scale_w)   y = fma(t, scale_x, y)   from a centre, for each group of x

Layout  x as `quantize` leaves it, weight in tiles of 16 rows (`tiles`) -> y [M, N],
        bf16 or fp32
Fused   RMS norm of x, or norms of its heads, in `quantize`; the norm's factor, residual + y or
        bias + y, silu(gate) * up for a paired weight
Bytes   N*K*bits/8 for every block of tokens, M*K*33/32 for every block of rows, 2*M*N or 4*M*N
Plan    a warp takes one or two tiles and up to 64 tokens over the whole of K. Its codes are the A
        operand, loaded a step of 128 k ahead and unpacked in registers; a block's step of x comes
        by `cp.async`, some steps ahead, for all warps. Sums stay in registers, from the centre of a
        row and a token on, which is taken away at the end, or are integers (`formats.activations`):
        a token's bits are those of `gemv_int8`
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.formats.activations import activation_group
from lowbit.runtime.kernels.launch.device import card_of, power_of_two, run
from lowbit.runtime.kernels.linear.gemm_store import store_block
from lowbit.runtime.kernels.linear.int8_steps import (
    centres_of_tiles,
    integer_starts,
    multiply_step,
    numbers_of_rows,
)
from lowbit.runtime.kernels.linear.products import raw_scales, tile_addresses
from lowbit.runtime.kernels.linear.program import STEP_K, Blocks, Packed, token_blocks, wide
from lowbit.runtime.kernels.linear.quantize import bound_pair, factor_pair, quantize
from lowbit.runtime.kernels.linear.sums import row_numbers, scaled
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    commit_copies,
    copy16,
    load8,
    load16,
    shared_memory,
    wait_copies,
)
from lowbit.runtime.kernels.ptx.mma import (
    threads,
)

STAGES = 4  # of `MmaPlan`
REGISTERS = 255  # of a thread
LEAST_BLOCK = 16  # tokens of a block
# More than MANY tokens take blocks of MANY_BLOCK; in blocks of 128 registers spill.
MANY, MANY_BLOCK = 64, 96


@dataclass(frozen=True, slots=True, eq=False)
class MmaPlan:
    """Constants of a launch; made once, so compared by identity (see `program`)."""

    W: Packed  # the weight, `wide`
    X: Blocks  # places of x
    PAIRED: bool  # whether rows are those of gate and up in turn, which become their SwiGLU
    WARPS: int
    TILES: int  # of 16 rows of a warp
    BESIDE: int  # warps that share the tokens of a block
    STAGES: int  # steps of x on their way or in use
    AHEAD: int  # steps of words on their way, which few warps need more of
    SHARED: int  # bytes of shared memory
    PDL: bool  # whether the kernel takes part in programmatic launch
    SUMMED: bool = False  # whether two rows of x are a token; see `remainders`


@cache
def mma_plan(W: Packed, tokens: int, paired: bool, pdl: bool, summed: bool = False) -> MmaPlan:
    """Constants of a launch for `tokens` tokens; more than MANY have the same ones."""
    block = MANY_BLOCK if tokens > MANY else max(power_of_two(tokens), LEAST_BLOCK)
    X = token_blocks(W.K, activation_group(W.G, W.K), block, whole=W.WHOLE)
    warps, beside = (8, 2) if tokens > MANY else (4, 1)
    tiles = 2 if tokens > MANY and X.GROUP == 128 else 1  # with smaller groups registers spill
    ahead = 1 if tokens > MANY else 3 if block < MANY else 2
    sizes = warps, tiles, beside, STAGES, ahead, STAGES * X.SIZE
    return MmaPlan(wide(W), X, paired, *sizes, pdl, summed)


def mma_int8(
    x: Tensor,
    w: TiledLinear,
    *,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`added + rms_norm(x) @ w.T` of x in eight bits; see `gemv`.

    Args:
        x: [M, K] bfloat16, contiguous.
        w: [N, K], N a multiple of 16.
        norm: [K] gain of an RMS norm.
        squares: [M, heads, SQUARES] float32, of the heads of x.
        added: [M, N] or [1, N] bfloat16.
        dtype: of the result: bfloat16, or float32, which is not rounded.

    Returns:
        [M, N], for a paired weight [M, N / 2], or where two rows are a token [M / 2, N] float32.
    """
    M, card = x.shape[0], card_of(x)
    plan = mma_plan(w.constants, min(M, MANY + 1), w.paired, card.overlaps, w.remainders)
    codes = quantize(x, w.bits, plan.X, norm=norm, squares=squares, eps=eps)
    blocks = -(-M // plan.X.TOKENS)
    row_blocks = -(-w.tiles // (plan.WARPS // plan.BESIDE * plan.TILES))
    y = w.new_product(M, dtype)
    run(
        _mma_int8_kernel,
        (row_blocks * blocks,),
        codes,
        w.words,
        w.scales.view(torch.int32),
        w.rows,
        None if added is None else added.view(torch.int32),
        y if dtype == torch.float32 else y.view(torch.int32),
        M,
        w.outputs,
        w.tiles,
        blocks,
        0 if added is None or added.shape[0] == 1 else w.outputs,
        NORM=norm is not None,
        PLAN=plan,
        num_warps=plan.WARPS,
        maxnreg=card.register_cap(REGISTERS),
        launch_pdl=plan.PDL,
        enable_fp_fusion=True,
    )
    return y


@gluon.jit(do_not_specialize=["M", "N", "tiles", "blocks", "stride"])
def _mma_int8_kernel(
    x_ptr, words_ptr, scales_ptr, rows_ptr, added_ptr, out_ptr, M, N, tiles, blocks, stride,
    NORM: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """N: columns of the output; stride: from row to row of what is added; blocks: of tokens."""
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    TILES: gl.constexpr = PLAN.TILES
    BESIDE: gl.constexpr = PLAN.BESIDE
    STAGES: gl.constexpr = PLAN.STAGES
    TOKENS: gl.constexpr = X.TOKENS // BESIDE  # of a warp
    COUNT: gl.constexpr = TOKENS // 2  # sums of a tile in a lane
    if PLAN.PDL:
        gdc_launch_dependents()
    warp, lane, zero, zero_f32 = threads(PLAN.WARPS)
    buffer = shared_memory(PLAN.SHARED, PLAN.WARPS, N < 0) + zero
    block = gl.program_id(0) % blocks
    first_tile = gl.program_id(0) // blocks * (PLAN.WARPS // BESIDE * TILES)
    first_tile = first_tile + warp // BESIDE * TILES
    first_token = warp % BESIDE * TOKENS  # of the block
    at = tile_addresses(words_ptr, scales_ptr, first_tile, tiles, 0, lane, TILES, W)
    AHEAD: gl.constexpr = PLAN.AHEAD
    loaded = ()
    for i in gl.static_range(AHEAD):
        loaded = loaded + (_load_step(at, gl.minimum(i, X.STEPS - 1) + zero, W, X),)
    if PLAN.PDL:
        gdc_wait()
    x = x_ptr.to(gl.int64, bitcast=True) + (zero + block).to(gl.int64) * X.SIZE
    for i in gl.static_range(STAGES - 1):
        _begin_copy(buffer + i * X.SIZE, x, zero + i, blocks, warp * 32 + lane, PLAN)
    first_row = block * X.TOKENS + first_token
    if X.WHOLE:
        acc = integer_starts(lane, TILES * COUNT)
    else:
        acc = _centres((x_ptr, rows_ptr), blocks, first_row, first_tile, tiles, lane, PLAN)
    slot = zero
    for step in range(X.STEPS):
        later = _load_step(at, gl.minimum(step + AHEAD, X.STEPS - 1) + zero, W, X)
        wait_copies(STAGES - 2)
        barrier()  # all of this step has come, and nobody reads the one before it
        before = gl.where(slot == 0, STAGES - 1, slot - 1)
        _begin_copy(
            buffer + before * X.SIZE, x, zero + step + (STAGES - 1), blocks, warp * 32 + lane, PLAN
        )
        now = loaded[0]  # type: ignore[misc]
        acc = multiply_step(acc, now, buffer + slot * X.SIZE, first_token, lane, TOKENS, W, X)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        ready = ()
        for i in gl.static_range(1, AHEAD):
            ready = ready + (loaded[i],)
        loaded = ready + (later,)
    wait_copies(0)
    # Once more, so that none stay in registers.
    centres = ()
    if not X.WHOLE:
        centres = _centres((x_ptr, rows_ptr), blocks, first_row, first_tile, tiles, lane, PLAN)
    factors = ()
    for i in gl.static_range(TOKENS // 8):
        two = (zero_f32 + W.CODEC.FACTOR, zero_f32 + W.CODEC.FACTOR)
        if NORM:
            pair = factor_pair(x_ptr, blocks, first_row + i * 8 + lane % 4 * 2, X)
            two = (two[0] * pair[0], two[1] * pair[1])
        factors = factors + (two,)
    for r in gl.static_range(TILES):
        own = ()
        for i in gl.static_range(COUNT):
            one = acc[r * COUNT + i]
            if not X.WHOLE:
                one -= centres[r * COUNT + i]
            own = own + (one,)
        if X.WHOLE:
            tile = gl.minimum(first_tile + r, tiles - 1)
            own = scaled(own, row_numbers(rows_ptr, tile, lane))
        store_block(
            own, added_ptr, (), out_ptr, first_row, first_tile + r, lane, M, N, stride, factors,
            PLAN, PLAN.SUMMED,
        )  # fmt: skip


@gluon.jit
def _centres(ptrs, blocks, first_row, first_tile, tiles, lane, PLAN: gl.constexpr):
    """Starts of a warp's sums; see `centres_of_tiles`.

    ptrs: to x and to the bounds of the weight's rows. first_row: of the warp's tokens.
    """
    x_ptr, rows_ptr = ptrs
    X: gl.constexpr = PLAN.X
    TILES: gl.constexpr = PLAN.TILES
    tokens = ()
    for nt in gl.static_range(X.TOKENS // PLAN.BESIDE // 8):
        tokens = tokens + (bound_pair(x_ptr, blocks, first_row + nt * 8 + lane % 4 * 2, X),)
    rows = numbers_of_rows(rows_ptr, first_tile, tiles, lane, TILES)
    return centres_of_tiles(rows, tokens, PLAN.W.CODEC.FACTOR)


@gluon.jit
def _begin_copy(target, x, step, blocks, thread, PLAN: gl.constexpr):
    """Begin to copy a step's x of the block; past the last step, that one again."""
    X: gl.constexpr = PLAN.X
    CHUNKS: gl.constexpr = X.SIZE // 16
    THREADS: gl.constexpr = PLAN.WARPS * 32
    source = x + (gl.minimum(step, X.STEPS - 1) * blocks).to(gl.int64) * X.SIZE
    for first in gl.static_range(0, CHUNKS, THREADS):
        at = thread * 16
        if first + THREADS > CHUNKS:
            at = gl.minimum(thread, CHUNKS - first - 1) * 16
        copy16(target + at, source + at.to(gl.int64), first * 16, first * 16)
    commit_copies()


@gluon.jit
def _load_step(at, step, W: gl.constexpr, X: gl.constexpr):
    """Words of 128 k of every tile for `product_codes`, and raw scales of the groups of x."""
    words, scales = at
    GROUPS: gl.constexpr = STEP_K // X.GROUP
    GROUP_BYTES: gl.constexpr = 64 if W.SCALES == "fp32" else 32
    SCALES: gl.constexpr = W.SCALES
    LOADS: gl.constexpr = W.CODEC.LOADS
    loaded = ()
    raw = ()
    for r in gl.static_range(len(words)):
        loads = ()
        if W.CODEC.STEP_K == STEP_K:
            here = words[r] + step.to(gl.int64) * W.CODEC.STEP_BYTES
            for i in gl.static_range(LOADS):
                loads = loads + (load16(here, 512 * i),)
        else:  # half of a step
            here = words[r] + (step // 2).to(gl.int64) * W.CODEC.STEP_BYTES
            here += (step % 2).to(gl.int64) * 8
            for i in gl.static_range(LOADS):
                loads = loads + (load8(here, 512 * i),)
        loaded = loaded + (loads,)
        for group in gl.static_range(GROUPS):
            own = gl.minimum((step * STEP_K + group * X.GROUP) // W.G, W.GROUPS - 1)
            raw = raw + (raw_scales(scales[r] + own.to(gl.int64) * GROUP_BYTES, 0, SCALES),)
    return loaded, raw
