"""digits: x as digits of 8 bits, so that codes are multiplied as they are.

Codes are signed bytes, or the upper half of one, and tensor cores multiply bytes exactly. So x
becomes numbers of three digits to the base 256, and `integer_mma` takes the digits as columns:

    x[k] = unit * (d0 + 256 * d1 + 65536 * d2)      d0, d1 in -128..127, d2 in -32..32

The unit is 2^-20 of the power of two below the largest of a block of 256 elements, which is what a
warp takes at a time: an element is off by at most 2^-21 of that largest, and one of BF16 above
2^-13 of it is exact. But it is at least 2^-126. NaN and infinities make their block NaN.

A token's digits are three planes of a byte for each k, 2 * d2 in the last; its units are FP32.
Chunks of 8 lie as two steps of `integer_mma` take them, 16 bytes of a lane side by side; in each
the order of k is that of the codes in their words (`tiles`). Every program of a GEMV stages them in
its shared memory (`stage_tokens`), or a kernel before it leaves them in global memory (`digits`):

Layout  x [B, K] bf16 -> for every 64 k the planes of all tokens, 64 bytes each; then units, then
        the factor of each token's norm (`Digits`)
Fused   x times the gain of an RMS norm; or norms of its heads
Bytes   2*B*K read, 3*B*K written
Plan    a warp takes a block of 256 elements. A normed token is one program, which knows its sum of
        squares in the end; others are spread over more. Digits, units and factors have the same
        bits as those that the programs of a GEMV make
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.codec import CODECS
from lowbit.runtime.kernels.launch.device import power_of_two, programmatic_launch, run
from lowbit.runtime.kernels.linear.norm import (
    add_squares,
    chunk_gains,
    diagonal,
    head_factor,
    norm_factor,
    place,
    times_gains,
    total_of,
)
from lowbit.runtime.kernels.linear.program import (
    BLOCK_K,
    SQUARES_BYTES,
    Digits,
    turns_of,
)
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    declaration,
    load16,
    shared_buffer,
    store8,
    store_shared4,
    store_shared8,
)
from lowbit.runtime.kernels.ptx.mma import (
    as_float,
    as_word,
    bytes_of,
    high_half,
    larger,
    largest,
    low_half,
    threads,
    words_where,
)
from lowbit.runtime.kernels.ptx.wgmma import swizzled

MOST_WARPS = 16  # of a program that takes a whole token
SPREAD_WARPS = 4  # of a program where a token is spread over several


@gluon.jit
def digits_of(w, factor, SCALED: gl.constexpr, SUBBYTE: gl.constexpr):
    """A lane's chunk of 8 elements as two words for each plane, and the unit of the warp's block.

    factor: what the chunk is multiplied by, where SCALED. SUBBYTE: of the `Codec`.
    """
    most = larger(
        larger(w[0] & 0x7FFF7FFF, w[1] & 0x7FFF7FFF),
        larger(w[2] & 0x7FFF7FFF, w[3] & 0x7FFF7FFF),
    )
    most = gl.maximum(most >> 16, most & 0xFFFF)
    if SCALED:
        most = as_word(as_float(most << 16) * factor) >> 16
    # Its exponent; below 21 the unit would not be a normal number, and factors, which are at
    # most 2^10 (eps of 1e-6), must leave the scale finite.
    exponent = gl.maximum(largest(most) >> 7, 31 if SCALED else 21)
    scale = as_float((274 - exponent) << 23)
    if SCALED:
        scale *= factor
    k0, k1 = _fixed(w[0], scale)
    k2, k3 = _fixed(w[1], scale)
    k4, k5 = _fixed(w[2], scale)
    k6, k7 = _fixed(w[3], scale)
    if SUBBYTE:
        a = _digits(k0, k4, k1, k5)
        b = _digits(k2, k6, k3, k7)
    else:
        a = _digits(k0, k2, k1, k3)
        b = _digits(k4, k6, k5, k7)
    unit = as_float(gl.where(exponent == 255, 0x7FC00000, (exponent - 20) << 23))
    return ((a[0], b[0]), (a[1], b[1]), (a[2], b[2])), unit


@gluon.jit
def place_of_chunk(chunk, STRIDE: gl.constexpr):
    """Offset of a chunk's 8 bytes in a plane whose blocks of 64 k are STRIDE bytes apart."""
    return chunk // 8 * STRIDE + (chunk % 4 * 16 + chunk // 4 % 2 * 8)


@gluon.jit
def stage_tokens(
    x_ptr, rows, gains, head_squares_ptr, buffer, warp, lane, zero_f32, B, eps,
    HEAD: gl.constexpr, SUBBYTE: gl.constexpr, WARPS: gl.constexpr, X: gl.constexpr, share=0,
):  # fmt: skip
    """Put the digits of all tokens into shared memory, and sums of squares where there are gains.

    rows: addresses of all tokens, if they do not lie side by side from x_ptr on.
    B: tokens that are there; the last is repeated beyond.
    share: which of the SHARERS this program is.
    HEAD: elements of x that are normed by one of the sums of squares; 0 where none are given.
    """
    NORM: gl.constexpr = len(gains) > 0
    K: gl.constexpr = X.K
    ALL: gl.constexpr = X.TOKENS * X.BLOCKS
    TURNS: gl.constexpr = turns_of(ALL, WARPS)
    AHEAD: gl.constexpr = TURNS if X.TOKENS == 1 or TURNS < 8 else 8  # turns whose loads are issued
    units = buffer + X.UNITS
    x = x_ptr.to(gl.int64, bitcast=True)
    for first in gl.static_range(0, TURNS, AHEAD):
        loaded = ()
        squares = ()
        for turn in gl.static_range(first, first + AHEAD if first + AHEAD < TURNS else TURNS):
            token, block = place(turn, warp, WARPS, X)
            chunk = shared_block(block, share, X) * 32 + lane
            if K % BLOCK_K != 0 or (turn + 1) * WARPS > ALL or X.SHARERS > 1:
                chunk = gl.minimum(chunk, K // 8 - 1)  # past the end: the last one again
            if len(rows) > 0:
                loaded = loaded + (load16(_row_of(token, rows) + chunk.to(gl.int64) * 16),)
            elif X.TOKENS == 1:
                loaded = loaded + (load16(x + chunk.to(gl.int64) * 16),)
            else:
                token = gl.minimum(token, B - 1)
                loaded = loaded + (load16(x + (token * (K // 8) + chunk).to(gl.int64) * 16),)
            if HEAD > 0:
                head = token * (K // HEAD) + chunk // (HEAD // 8)
                at = head_squares_ptr.to(gl.int64, bitcast=True) + head.to(gl.int64) * 16
                squares = squares + (load16(at),)
        for turn in gl.static_range(first, first + AHEAD if first + AHEAD < TURNS else TURNS):
            token, block = place(turn, warp, WARPS, X)
            chunk = block * 32 + lane
            inside = shared_block(block, share, X) * 32 + lane < K // 8
            if X.TOKENS > 1:
                inside = inside & (token < X.TOKENS)
            w = loaded[turn - first]
            if NORM and (K % BLOCK_K != 0 or (turn + 1) * WARPS > ALL):
                w = words_where(inside, w)
            scaled = w
            if NORM:
                scaled = times_gains(w, gains[turn % len(gains)])
            factor = zero_f32
            if HEAD > 0:
                factor = head_factor(squares[turn - first], eps, HEAD)
            planes, unit = digits_of(scaled, factor, HEAD > 0, SUBBYTE)
            here = buffer + place_of_chunk(chunk, X.NEXT)
            if X.TOKENS > 1:
                here += token * X.TOKEN
            for plane in gl.static_range(3):
                store_shared8(here + plane * X.PLANE, planes[plane], inside)
            store_shared4(units + (block * X.TOKENS + token) * 4, unit, inside & (lane == 0))
            if NORM:
                no_sums = (zero_f32, zero_f32, zero_f32, zero_f32)
                own, there = diagonal(add_squares(no_sums, w), lane)
                at = buffer + X.SQUARES + (token * X.BLOCKS + block) * SQUARES_BYTES
                if (turn + 1) * WARPS > ALL:
                    there = there & (block < X.BLOCKS)
                    if X.TOKENS > 1:
                        there = there & (token < X.TOKENS)
                store_shared4(at + lane // 4 * 4, own, there)


@gluon.jit
def shared_block(block, share, X: gl.constexpr):
    """The block of a token that is a program's own block of this number."""
    if X.SHARERS > 1:
        block = (block // X.RUN * X.SHARERS + share) * X.RUN + block % X.RUN
    return block


@gluon.jit
def _row_of(token, rows):
    row = rows[0]
    for i in gl.static_range(1, len(rows)):
        row = gl.where(token == i, rows[i], row)
    return row


@gluon.jit
def _fixed(pair, scale):
    """Two elements as integers of 22 bits, in the low 24 of two words, 0x408080 too large.

    1.5 * 2^23 + 0x8080 keeps the exponent of the sum, whatever the sign, and the digits unsigned.
    """
    low = low_half(pair) * scale + 12615808.0
    high = high_half(pair) * scale + 12615808.0
    return as_word(low), as_word(high)


@gluon.jit
def _digits(a, b, c, d):
    """Four integers in three planes, as signed bytes."""
    low = bytes_of(a, b, 0x5140)
    high = bytes_of(c, d, 0x5140)
    top = bytes_of(bytes_of(a, b, 0x0062), bytes_of(c, d, 0x0062), 0x5410)
    return (
        bytes_of(low, high, 0x5410) ^ -0x7F7F7F80,
        bytes_of(low, high, 0x7632) ^ -0x7F7F7F80,
        (top << 1) ^ -0x7F7F7F80,  # of 7 bits, 64 too large
    )


@gluon.jit
def _digits_kernel(
    x_ptr, gain_ptr, head_squares_ptr, out_ptr, eps, HEAD: gl.constexpr, SUBBYTE: gl.constexpr,
    TURNS: gl.constexpr, WARPS: gl.constexpr, X: gl.constexpr, SHARED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """TURNS: blocks that a warp takes; HEAD: see `stage_tokens`."""
    NORM: gl.constexpr = gain_ptr is not None
    warp, lane, zero, zero_f32 = threads(WARPS)
    first = gl.program_id(1) * (TURNS * WARPS) + warp
    token = gl.program_id(0)
    gains = ()
    for turn in gl.static_range(TURNS if NORM else 0):
        chunk = gl.minimum((first + turn * WARPS) * 32 + lane, X.K // 8 - 1).to(gl.int64)
        gains = gains + (chunk_gains(gain_ptr, chunk),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = x_ptr.to(gl.int64, bitcast=True) + token.to(gl.int64) * (2 * X.K)
    loaded = ()
    squares = ()
    for turn in gl.static_range(TURNS):
        chunk = gl.minimum((first + turn * WARPS) * 32 + lane, X.K // 8 - 1)
        loaded = loaded + (load16(x + chunk.to(gl.int64) * 16),)
        if HEAD > 0:
            at = (token * (X.K // HEAD) + chunk // (HEAD // 8)).to(gl.int64) * 16
            squares = squares + (load16(head_squares_ptr.to(gl.int64, bitcast=True) + at),)
    out = out_ptr.to(gl.int64, bitcast=True)
    buffer = zero
    if NORM:
        buffer = shared_buffer(SHARED) + zero
    for turn in gl.static_range(TURNS):
        block = first + turn * WARPS
        chunk = block * 32 + lane
        inside = chunk < X.K // 8
        w = loaded[turn]
        if NORM:
            w = words_where(inside, w)
            own, there = diagonal(add_squares((zero_f32, zero_f32, zero_f32, zero_f32), w), lane)
            at = buffer + block * SQUARES_BYTES + lane // 4 * 4
            store_shared4(at, own, there & (block < X.BLOCKS))
            w = times_gains(w, gains[turn])
        factor = zero_f32
        if HEAD > 0:
            factor = head_factor(squares[turn], eps, HEAD)
        planes, unit = digits_of(w, factor, HEAD > 0, SUBBYTE)
        if X.ROW > 0:
            _store_swizzled(out_ptr, planes, unit, token, chunk, lane, inside, X)
        else:
            here = out + (place_of_chunk(chunk, X.NEXT) + token * X.TOKEN).to(gl.int64)
            for plane in gl.static_range(3):
                store8(here + plane * X.PLANE, planes[plane], inside)
            unit_at = out_ptr + (X.UNITS // 4 + block * X.TOKENS + token)
            gl.store(unit_at, as_word(unit), mask=inside & (lane == 0))
    if NORM:
        barrier()
        factor = norm_factor(total_of(buffer, lane, zero_f32, X), eps, X.K)
        at = out_ptr + (X.FACTORS // 4 + token) + zero
        stored = (warp == 0) & (lane == 0)
        gl.store(at, as_word(factor), mask=stored)


@gluon.jit
def _store_swizzled(out_ptr, planes, unit, token, chunk, lane, inside, X: gl.constexpr):
    """Store a chunk where `wgmma` wants it, and the unit of every step; zero past K."""
    CHUNKS: gl.constexpr = X.ROW // 8  # of a step
    step = chunk // CHUNKS
    for plane in gl.static_range(3):
        row = plane * X.TOKENS + token
        for half in gl.static_range(2):
            at = swizzled(row, chunk % CHUNKS // 4 * 2 + half, X.ROW)
            word = (step * (3 * X.TOKENS) + row) * (X.ROW // 4) + at * 4 + lane % 4
            gl.store(out_ptr + word, planes[plane][half], mask=inside)
    starts = (step < X.STEPS) & (lane % CHUNKS == 0)
    unit_at = out_ptr + (X.UNITS // 4 + step * X.TOKENS + token)
    gl.store(unit_at, gl.where(inside, as_word(unit), 0), mask=starts)


@gluon.jit
def given_factor(digits_ptr, token, X: gl.constexpr):
    """The factor of a token's norm that `digits` has left behind planes and units."""
    return gl.load(digits_ptr + X.FACTORS // 4 + token).to(gl.float32, bitcast=True)


def digits(
    x: Tensor,
    bits: int,
    places: Digits,
    *,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Digits of x for codes of so many bits, as a GEMV reads them: int32.

    Args:
        x: [B, K] bfloat16, contiguous.
        bits: of the codes, on which the order of k depends.
        places: of `global_digits` or `swizzled_digits`, for B tokens or more.
        norm: [K] gain of the RMS norm, whose factors follow the units.
        squares: [B, heads, SQUARES] float32, of the heads of x.
    """
    B, K = x.shape
    size = places.FACTORS // 4 + places.TOKENS
    out = torch.empty(size, dtype=torch.int32, device=x.device)
    blocks = max(places.BLOCKS, -(-places.STEPS * places.ROW // BLOCK_K.value))
    warps = min(MOST_WARPS, power_of_two(blocks)) if norm is not None else SPREAD_WARPS
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
        HEAD=0 if squares is None else K // squares.shape[1],
        SUBBYTE=CODECS[bits].SUBBYTE,
        TURNS=turns,
        WARPS=warps,
        X=places,
        SHARED=declaration(blocks * SQUARES_BYTES.value),
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return out
