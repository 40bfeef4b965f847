"""digits: tokens as digits in global memory, in the form in which `gemv` would stage them.

Layout  x [B, K] bf16 -> for every 64 k the planes of all tokens, 64 bytes each; then units, then
        the factor of each token's norm
Fused   x times the gain of an RMS norm; or norms of its heads
Bytes   2*B*K read, 3*B*K written
Plan    a warp takes a block of 256 elements. A normed token is one program, which knows its sum of
        squares in the end; others are spread over more. Digits, units and factors have the same
        bits as those that the programs of `gemv` make
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import programmatic_launch, run
from lowbit.runtime.kernels.linear.digit_planes import digits_of, place_of_chunk
from lowbit.runtime.kernels.linear.stage import (
    BLOCK_K,
    SQUARES_BYTES,
    add_squares,
    blocks_of,
    diagonal,
    head_factor,
    load_gains,
    norm_factor,
    times_gains,
    total_of,
)
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    declaration,
    load16,
    shared_buffer,
    store8,
    store_shared4,
)
from lowbit.runtime.kernels.ptx.mma import as_word, threads, words_where

EARLY = False  # whether the GEMV may start before the kernel has its input
MOST_WARPS = 16
SPREAD_WARPS = 4  # of a program where a token is spread over several


def planes_bytes(K: int, tokens: int) -> int:
    """Bytes of all planes of so many tokens."""
    return -(-K // 128) * 2 * 64 * 3 * tokens


def digits_bytes(K: int, tokens: int) -> int:
    """Bytes of planes, units and factors."""
    return planes_bytes(K, tokens) + (blocks_of(K) + 1) * tokens * 4


@gluon.jit
def _digits_kernel(
    x_ptr, gain_ptr, head_squares_ptr, out_ptr, eps,
    K: gl.constexpr, BITS: gl.constexpr, TOKENS: gl.constexpr, HEAD: gl.constexpr,
    TURNS: gl.constexpr, WARPS: gl.constexpr, SHARED: gl.constexpr, PDL: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """TURNS: blocks that a warp takes."""
    BLOCKS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PLANES: gl.constexpr = (K + 127) // 128 * 384 * TOKENS
    NORM: gl.constexpr = gain_ptr is not None
    FP32: gl.constexpr = gain_ptr is not None and gain_ptr.dtype.element_ty == gl.float32
    warp, lane, zero, none = threads(WARPS)
    first = gl.program_id(1) * (TURNS * WARPS) + warp
    token = gl.program_id(0)
    gains = load_gains(gain_ptr, first, lane, K, WARPS, 1, TURNS)
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    x = x_ptr.to(gl.int64, bitcast=True) + token.to(gl.int64) * (2 * K)
    loaded = ()
    squares = ()
    for turn in gl.static_range(TURNS):
        chunk = gl.minimum((first + turn * WARPS) * 32 + lane, K // 8 - 1)
        loaded = loaded + (load16(x + chunk.to(gl.int64) * 16),)
        if HEAD > 0:
            at = (token * (K // HEAD) + chunk // (HEAD // 8)).to(gl.int64) * 16
            squares = squares + (load16(head_squares_ptr.to(gl.int64, bitcast=True) + at),)
    out = out_ptr.to(gl.int64, bitcast=True)
    buffer = zero
    if NORM:
        buffer = shared_buffer(SHARED) + zero
    for turn in gl.static_range(TURNS):
        block = first + turn * WARPS
        chunk = block * 32 + lane
        inside = chunk < K // 8
        w = loaded[turn]
        if NORM:
            w = words_where(inside, w)
            own, there = diagonal(add_squares((none, none, none, none), w), lane)
            at = buffer + block * SQUARES_BYTES + lane // 4 * 4
            store_shared4(at, own, there & (block < BLOCKS))
            w = times_gains(w, gains[turn], FP32)
        factor = none
        if HEAD > 0:
            factor = head_factor(squares[turn], eps, HEAD)
        planes, unit = digits_of(w, factor, HEAD > 0, BITS)
        here = out + (place_of_chunk(chunk, 192 * TOKENS) + token * 64).to(gl.int64)
        for plane in gl.static_range(3):
            store8(here + plane * (64 * TOKENS), planes[plane], inside)
        unit_at = out_ptr + (PLANES // 4 + block * TOKENS + token)
        gl.store(unit_at, as_word(unit), mask=inside & (lane == 0))
    if NORM:
        barrier()
        factor = norm_factor(total_of(buffer, lane, none, K), eps, K)
        at = out_ptr + (PLANES // 4 + BLOCKS * TOKENS + token) + zero
        stored = (warp == 0) & (lane == 0)
        gl.store(at, as_word(factor), mask=stored)


def digits(
    x: Tensor,
    bits: int,
    tokens: int,
    *,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Digits of x for codes of so many bits, as `gemv` reads them: [digits_bytes / 4] int32.

    Args:
        x: [B, K] bfloat16, contiguous.
        bits: of the codes, on which the order of k depends.
        tokens: B or more, that the result has room for.
        norm: [K] gain of the RMS norm, whose factors follow the units.
        squares: [B, heads, SQUARES] float32, of the heads of x.
        eps: of the norm.
    """
    B, K = x.shape
    out = torch.empty(digits_bytes(K, tokens) // 4, dtype=torch.int32, device=x.device)
    blocks = blocks_of(K)
    warps = min(MOST_WARPS, 1 << (blocks - 1).bit_length()) if norm is not None else SPREAD_WARPS
    turns = -(-blocks // warps) if norm is not None else 1
    pdl = programmatic_launch(x)
    run(
        _digits_kernel,
        (B, -(-blocks // (warps * turns))),
        x,
        norm,
        squares,
        out,
        eps,
        K=K,
        BITS=bits,
        TOKENS=tokens,
        HEAD=0 if squares is None else K // squares.shape[1],
        TURNS=turns,
        WARPS=warps,
        SHARED=declaration(blocks * 32),
        PDL=pdl,
        EARLY=EARLY,
        num_warps=warps,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return out
