"""quantize: x in eight bits, with FP32 scales for each token or its groups, as `wgmma` copies it.

    m = max(max|x|, 2^-100)    q = rint(x * (127 / m))    s = m * fp32(1 / 127), odd    in FP32

A group with NaN or an infinity has scale NaN (`formats.activations`).

Layout  x [M, K] bf16 -> for every step of 128 k and block of T tokens (`Blocks`): T rows of 128
        bytes in wgmma's swizzle, k in the order of the codes (`tiles`); then the scales, for each
        group of the step those of all T tokens. Behind the last step the factor of each token's
        norm, then each token's bound, or those of its parts; of a token with one scale neither
        scales nor bounds, but that scale times the factor. Rows of padding repeat the last token,
        columns past K are zeros
Fused   x times the gain of an RMS norm, rounded to BF16; or norms of its heads
Bytes   2*M*K read, M*K + 4*M*K/GROUP written
Plan    a token is one program, or several where it is long and there are few. A warp takes blocks
        of 256 elements, a chunk of 8 a lane, as `digits` does. Neighbouring lanes exchange words,
        so that each stores 8 bytes side by side. Codes, scales and factors have the same bits as
        those that programs of a GEMV make
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
    times_gains,
    total_of,
)
from lowbit.runtime.kernels.linear.program import (
    SQUARES_BYTES,
    STEP_K,
    Blocks,
)
from lowbit.runtime.kernels.linear.rounding import (
    LEAST_PEAK,
    codes_of,
    group_bound,
    peak_of,
    rounded_chunk,
    scale_of,
)
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    declaration,
    load8,
    load16,
    load_shared4,
    shared_buffer,
    store8,
    store_shared4,
)
from lowbit.runtime.kernels.ptx.mma import (
    across,
    as_float,
    as_word,
    largest,
    quotient,
    threads,
    words_where,
)
from lowbit.runtime.kernels.ptx.wgmma import swizzled

MOST_WARPS = 16  # of a program


def arranged(q: Tensor, s: Tensor, bits: int, places: Blocks) -> Tensor:
    """The bytes that `quantize` makes of codes and scales, but for the factors: the reference.

    Args:
        q: [M, K] int8.
        s: [M, groups] float32.

    Returns:
        [steps, blocks, SIZE] uint8; rows of padding are zeros.
    """
    T, steps, step_k = places.TOKENS, places.STEPS, STEP_K.value
    blocks = -(-len(q) // T)
    codes, scales = q.new_zeros(blocks * T, steps * step_k), s.new_zeros(blocks * T, steps * step_k)
    codes[: q.shape[0], : q.shape[1]] = q
    scales = scales[:, :: places.GROUP].contiguous()
    scales[: s.shape[0], : s.shape[1]] = s
    first, second = (0, 4, 1, 5), (2, 6, 3, 7)
    if not CODECS[bits].SUBBYTE:
        first, second = (0, 2, 1, 3), (4, 6, 5, 7)
    order = [8 * chunk + k for ks in (first, second) for chunk in range(4) for k in ks]
    rows = codes.view(blocks, T, steps, 4, 32)[..., order].view(blocks, T, steps, 8, 16)
    out = torch.empty_like(rows)
    for t in range(T):
        out[:, t][:, :, [c ^ t % 8 for c in range(8)]] = rows[:, t]
    out = out.permute(2, 0, 1, 3, 4).reshape(steps, blocks, -1).view(torch.uint8)
    scales = scales.view(blocks, T, steps, -1).permute(2, 0, 3, 1)
    if places.SIXTEENS:
        scales = scales.unflatten(-1, (-1, 2, 4, 2)).transpose(-2, -3).flatten(-4)
    scales = scales.reshape(steps, blocks, -1).contiguous()
    return torch.cat((out, scales.view(torch.uint8)), -1)


@gluon.jit(do_not_specialize=["M", "blocks"])
def _quantize_kernel(
    x_ptr, gain_ptr, head_squares_ptr, out_ptr, M, blocks, eps, HEAD: gl.constexpr,
    SUBBYTE: gl.constexpr, TURNS: gl.constexpr, WARPS: gl.constexpr, X: gl.constexpr,
    SHARED: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """TURNS: blocks of 256 elements that a warp takes; HEAD: elements of a factor, or 0.

    Programs of the second axis share a row, and each leaves a bound of its own.
    """
    NORM: gl.constexpr = gain_ptr is not None
    if PDL and EARLY:
        gdc_launch_dependents()
    warp, lane, zero, zero_f32 = threads(WARPS)
    first = warp + gl.program_id(1) * (TURNS * WARPS)
    row = gl.program_id(0)
    token = gl.minimum(row, M - 1)
    gains = ()
    for turn in gl.static_range(TURNS if NORM else 0):
        chunk = gl.minimum((first + turn * WARPS) * 32 + lane, X.K // 8 - 1).to(gl.int64)
        gains = gains + (chunk_gains(gain_ptr, chunk),)
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    x = x_ptr.to(gl.int64, bitcast=True) + token.to(gl.int64) * (2 * X.K)
    loaded = ()
    squares = ()
    for turn in gl.static_range(TURNS):
        chunk = gl.minimum((first + turn * WARPS) * 32 + lane, X.K // 8 - 1)
        loaded = loaded + (load16(x + chunk.to(gl.int64) * 16),)
        if HEAD > 0:
            at = token.to(gl.int64) * (X.K // HEAD * 16) + (chunk // (HEAD // 8) * 16).to(gl.int64)
            squares = squares + (load16(head_squares_ptr.to(gl.int64, bitcast=True) + at),)
    buffer = shared_buffer(SHARED) + zero
    bounds = buffer
    if NORM:
        bounds += X.BLOCKS * SQUARES_BYTES
    if X.WHOLE:
        _store_whole(
            out_ptr, loaded, gains, buffer, bounds, row, first, warp, lane, zero_f32, blocks, eps,
            SUBBYTE, WARPS, X,
        )  # fmt: skip
    else:
        _store_groups(
            out_ptr, loaded, gains, squares, buffer, bounds, row, first, warp, lane, zero_f32,
            blocks, eps, HEAD, SUBBYTE, WARPS, X,
        )  # fmt: skip


@gluon.jit
def _store_groups(
    out_ptr, loaded, gains, squares, buffer, bounds, row, first, warp, lane, zero_f32, blocks, eps,
    HEAD: gl.constexpr, SUBBYTE: gl.constexpr, WARPS: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """Store codes and scales of a row's groups, its bound and its norm's factor."""
    NORM: gl.constexpr = len(gains) > 0
    zero = lane * 0
    largest_bound = zero
    for turn in gl.static_range(len(loaded)):
        block = first + turn * WARPS
        chunk = block * 32 + lane
        w = words_where(chunk < X.K // 8, loaded[turn])
        if NORM:
            own, there = diagonal(add_squares((zero_f32, zero_f32, zero_f32, zero_f32), w), lane)
            at = buffer + block * SQUARES_BYTES + lane // 4 * 4
            store_shared4(at, own, there & (block < X.BLOCKS))
            w = times_gains(w, gains[turn])
        factor = zero_f32
        if HEAD > 0:
            factor = head_factor(squares[turn], eps, HEAD)
        codes, scale, units = codes_of(w, factor, lane, HEAD > 0, SUBBYTE, X.GROUP)
        _store_chunk(out_ptr, codes, scale, row, chunk, lane, blocks, X)
        largest_bound = gl.maximum(largest_bound, group_bound(scale, units))
    store_shared4(bounds + warp * 4, as_float(largest(largest_bound)), lane == 0)
    barrier()
    own = as_word(load_shared4(bounds + gl.minimum(lane, WARPS - 1) * 4))
    rows = blocks * X.TOKENS
    at = bound_at(out_ptr, blocks, row + gl.program_id(1) * rows + zero, X)
    gl.store(at, largest(own), mask=(warp == 0) & (lane == 0))
    if NORM:
        factor = norm_factor(total_of(buffer, lane, zero_f32, X), eps, X.K)
        at = factor_at(out_ptr, blocks, row + zero, X)
        gl.store(at, as_word(factor), mask=(warp == 0) & (lane == 0))


@gluon.jit
def _store_whole(
    out_ptr, loaded, gains, buffer, peaks, row, first, warp, lane, zero_f32, blocks, eps,
    SUBBYTE: gl.constexpr, WARPS: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """Store the codes of a row with one scale, and that times its norm's factor.

    peaks: address of the warps' largest elements in shared memory.
    """
    gained = ()
    most = lane * 0
    for turn in gl.static_range(len(loaded)):
        block = first + turn * WARPS
        w = words_where(block * 32 + lane < X.K // 8, loaded[turn])
        sums = add_squares((zero_f32, zero_f32, zero_f32, zero_f32), w)
        own, there = diagonal(sums, lane)
        at = buffer + block * SQUARES_BYTES + lane // 4 * 4
        store_shared4(at, own, there & (block < X.BLOCKS))
        w = times_gains(w, gains[turn])
        most = gl.maximum(most, peak_of(w))
        gained = gained + (w,)
    store_shared4(peaks + warp * 4, as_float(largest(most)), lane == 0)
    barrier()
    most = largest(as_word(load_shared4(peaks + gl.minimum(lane, WARPS - 1) * 4)))
    inverse = quotient(127.0, as_float(gl.maximum(most, LEAST_PEAK)))
    for turn in gl.static_range(len(loaded)):
        codes = rounded_chunk(gained[turn], zero_f32, inverse, False, SUBBYTE)
        chunk = (first + turn * WARPS) * 32 + lane
        _store_chunk(out_ptr, codes, lane * 0, row, chunk, lane, blocks, X)
    factor = scale_of(most) * norm_factor(total_of(buffer, lane, zero_f32, X), eps, X.K)
    at = factor_at(out_ptr, blocks, row + lane * 0, X)
    gl.store(at, as_word(factor), mask=(warp == 0) & (lane == 0))


@gluon.jit
def _store_chunk(out_ptr, codes, scale, row, chunk, lane, blocks, X: gl.constexpr):
    """Store a chunk where `wgmma` wants it, and the scale of its group."""
    CHUNKS: gl.constexpr = STEP_K // 8  # of a step
    step = chunk // CHUNKS
    even = lane % 2 == 0
    other = as_word(across(as_float(gl.where(even, codes[1], codes[0])), 1))
    first = gl.where(even, codes[0], other)
    second = gl.where(even, other, codes[1])
    own = row % X.TOKENS
    part = swizzled(own, chunk % CHUNKS // 4 * 2 + lane % 2, STEP_K)  # of 16 bytes
    base = (step * blocks + row // X.TOKENS).to(gl.int64) * X.SIZE
    out = out_ptr.to(gl.int64, bitcast=True) + base
    at = own * STEP_K + part * 16 + lane % 4 // 2 * 8
    store8(out + at.to(gl.int64), (first, second), step < X.STEPS)
    if not X.WHOLE:
        starts = (step < X.STEPS) & (chunk % (X.GROUP // 8) == 0)
        group = chunk % CHUNKS // (X.GROUP // 8)
        place = own
        if X.SIXTEENS:
            place = own // 16 * 16 + own // 2 % 4 * 4 + own // 8 % 2 * 2 + own % 2
        word = base // 4 + (X.SCALES // 4 + group * X.TOKENS + place).to(gl.int64)
        gl.store(out_ptr + word, scale, mask=starts)


@gluon.jit
def factor_at(out_ptr, blocks, row, X: gl.constexpr):
    """The place of a row's factor behind all blocks, as a pointer to a word."""
    return out_ptr + ((row * 0 + blocks).to(gl.int64) * (X.STEPS * X.SIZE // 4) + row)


@gluon.jit
def bound_at(out_ptr, blocks, row, X: gl.constexpr):
    """The place of a row's bound behind all factors, as a pointer to a word."""
    return factor_at(out_ptr, blocks, row, X) + blocks * X.TOKENS


@gluon.jit
def bound_pair(out_ptr, blocks, row, X: gl.constexpr):
    """Bounds of a row with an even number and of the next one."""
    BOUNDS: gl.constexpr = X.BOUNDS
    at = bound_at(out_ptr, blocks, row, X)
    pair = load8(at.to(gl.int64, bitcast=True))
    for part in gl.static_range(1, BOUNDS):
        other = load8((at + part * (blocks * X.TOKENS)).to(gl.int64, bitcast=True))
        pair = gl.maximum(pair[0], other[0]), gl.maximum(pair[1], other[1])
    return as_float(pair[0]), as_float(pair[1])


@gluon.jit
def factor_pair(out_ptr, blocks, row, X: gl.constexpr):
    """Factors of a row with an even number and of the next one."""
    pair = load8(factor_at(out_ptr, blocks, row, X).to(gl.int64, bitcast=True))
    return as_float(pair[0]), as_float(pair[1])


def quantize(
    x: Tensor,
    bits: int,
    places: Blocks,
    *,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    early: bool = True,
) -> Tensor:
    """Codes and scales of x in blocks, then the factors of its norm and all bounds: int32.

    Args:
        x: [M, K] bfloat16, contiguous.
        bits: of the weight's codes, on which the order of k depends.
        places: of `token_blocks`.
        norm: [K] gain of the RMS norm, whose factors follow the blocks, one for each row.
        squares: [M, heads, SQUARES] float32, of the heads of x.
        early: let the next kernel start before this one has its input.
    """
    M, K = x.shape
    blocks = -(-M // places.TOKENS)
    rows = blocks * places.TOKENS
    size = blocks * places.STEPS * places.SIZE // 4 + (1 + places.BOUNDS) * rows
    out = torch.empty(size, dtype=torch.int32, device=x.device)
    if norm is not None and places.BOUNDS > 1:
        raise ValueError("programs that share a row do not norm it")
    if norm is None and places.WHOLE:
        raise ValueError("one scale a token is that of a normed one")
    warps = min(MOST_WARPS, power_of_two(places.BLOCKS))
    shared = 4 * warps + (places.BLOCKS * SQUARES_BYTES.value if norm is not None else 0)
    pdl = programmatic_launch(x)
    run(
        _quantize_kernel,
        (rows, places.BOUNDS),
        x,
        norm,
        squares,
        out,
        M,
        blocks,
        eps,
        HEAD=0 if squares is None else K // squares.shape[1],
        SUBBYTE=CODECS[bits].SUBBYTE,
        TURNS=-(-places.BLOCKS // (warps * places.BOUNDS)),
        WARPS=warps,
        X=places,
        SHARED=declaration(shared),
        PDL=pdl,
        EARLY=early,
        num_warps=warps,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return out
