"""dense_gemv: y[b, n] = sum_k w[n, k] * x[b, k]     (few tokens or rows, BF16 weights, FP32 sums).

Layout  w [N, K] and x [B, K] bf16 -> y [B, N]
Fused   RMS norm of x: x * gain is rounded to bf16 and rsqrt(mean(x^2) + eps) multiplies the result;
        residual + y or bias + y
Bytes   2*N*K;  N = 248320, K = 1024 (the head of a tied model): 509 MB = 112 us at 4.56 TB/s
Plan    a program takes 16 rows or 32, and up to 32 tokens; those of the same rows run side by side,
        so that one brings the rows to L2 for all. BF16 as it is stored is what `mma` takes: a
        lane's 16 bytes of a row, and of the token of its column, are the chunk of 8 that it has of
        every 32 k. The steps of 32 k are dealt out to eight parts, which are summed apart and then
        joined in order, however many warps there are: no atomics, so bit-reproducible, and a token
        has the same bits in any company. `multiply_rows` is also the first programs of a GEMV that
        has dense rows beside it
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.kernels.launch.device import (
    STATIC_SHARED,
    power_of_two,
    programmatic_launch,
    run,
)
from lowbit.runtime.kernels.launch.linear import DenseLaunch, dense_launch
from lowbit.runtime.kernels.linear.norm import (
    add_squares,
    chunk_gains,
    diagonal,
    norm_factor,
    times_gains,
)
from lowbit.runtime.kernels.linear.sums import sum_of_parts
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    declaration,
    load16,
    load_shared4,
    load_shared16,
    shared_buffer,
    store_shared4,
    store_shared16,
    stream16,
    warp_barrier,
)
from lowbit.runtime.kernels.ptx.mma import as_word, mma, threads, words_where
from lowbit.runtime.kernels.rows import rms_norm_ref

WARPS = 8
FEW_ROWS = 1024  # up to which one token is staged in shared memory
CHUNK = 8  # columns that a lane loads together
ROW_PARTS = gl.constexpr(8)
PART_BYTES = gl.constexpr(512 + 32)  # of a part for 8 tokens: sums, and those of the squares
AT_ONCE = gl.constexpr(2)  # steps whose tokens are loaded together
AHEAD = gl.constexpr(8)  # steps of 16 rows that are on their way


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Constants of a program that multiplies dense rows."""

    K: int  # columns
    TOKENS: int  # that there is room for
    TILES: int  # of 16 rows
    WARPS: int  # of the program
    # whether each warp reads all of its part of one token at once and hands it round through shared
    # memory; K is a multiple of 256 then. Else x is read from L2, AT_ONCE steps at a time.
    STAGED: bool
    PDL: bool  # whether the kernel takes part in programmatic launch
    EARLY: bool  # whether it has let the next kernel start before
    STEPS: int  # of 32 columns of a part
    EACH: int  # parts of a warp
    AHEAD: int  # steps whose rows are on their way


@cache
def rows_of(
    K: int, launch: DenseLaunch, warps: int, staged: bool, pdl: bool, early: bool = False
) -> Rows:
    """Constants of a program for so many columns."""
    steps, each = -(-K // (32 * ROW_PARTS.value)), -(-ROW_PARTS.value // warps)
    ahead = AHEAD.value // launch.tiles
    return Rows(K, launch.tokens, launch.tiles, warps, staged, pdl, early, steps, each, ahead)


def rows_bytes(launch: DenseLaunch, staged: int = 0) -> int:
    """Shared-memory bytes of a program that multiplies dense rows; staged: elements of x."""
    return launch.tiles * -(-launch.tokens // 8) * 8 * (512 + 32) + 4 * staged


@gluon.jit
def multiply_rows(
    x_ptr, gain_ptr, rows_ptr, added_ptr, y_ptr, buffer, own, B, N, added_stride, eps,
    D: gl.constexpr,
):  # fmt: skip
    """The rows of one of the programs of `added + rms_norm(x) @ rows.T`, for B tokens.

    Squares of the norm are the diagonal of tokens times tokens.

    own: the program's number; warp, lane and zero of each thread.
    """
    number, warp, lane, zero_f32 = own
    K: gl.constexpr = D.K
    S: gl.constexpr = D.STEPS
    EACH: gl.constexpr = D.EACH
    ALL: gl.constexpr = EACH * S
    TILES: gl.constexpr = D.TILES
    NT: gl.constexpr = (D.TOKENS + 7) // 8
    NORM: gl.constexpr = gain_ptr is not None
    g = lane // 4
    t = lane % 4
    first_row = number * (16 * TILES)
    rows = ()
    for i in gl.static_range(2 * TILES):
        n = gl.minimum(first_row + (8 * i + g), N - 1).to(gl.int64)
        rows = rows + (rows_ptr.to(gl.int64, bitcast=True) + n * (2 * K),)
    first_chunk = gl.minimum(warp * EACH, ROW_PARTS - EACH) * 4 + t
    loaded = _load_rows((), rows, first_chunk, 0, min(D.AHEAD, ALL), S, K)
    own_gains = ()
    if D.STAGED:
        own_gains = _own_gains(gain_ptr, first_chunk, g, S, ALL)
    if D.PDL:
        gdc_wait()
        if not D.EARLY:
            gdc_launch_dependents()
    staged = buffer + ROW_PARTS * PART_BYTES + t * 16
    staged += gl.minimum(warp * EACH, ROW_PARTS - EACH) * (S * 64)
    if D.STAGED:
        _stage(x_ptr, own_gains, staged, first_chunk, g, S, ALL)
    sources = ()
    for nt in gl.static_range(NT):
        token = gl.minimum(nt * 8 + g, B - 1).to(gl.int64)
        sources = sources + (x_ptr.to(gl.int64, bitcast=True) + token * (2 * K),)
    for each in gl.static_range(EACH):
        sums = ()
        squares = ()
        for _i in gl.static_range(2 * TILES * NT):
            sums = sums + ((zero_f32, zero_f32, zero_f32, zero_f32),)
        for _i in gl.static_range(NT):
            squares = squares + ((zero_f32, zero_f32, zero_f32, zero_f32),)
        for c in gl.static_range(0, S, AT_ONCE):
            loaded = _load_rows(
                loaded, rows, first_chunk, len(loaded) // (2 * TILES),
                min(ALL, each * S + c + D.AHEAD), S, K,
            )  # fmt: skip
            sums, squares = _add_rows(
                sums, squares, loaded, gain_ptr, sources, staged, first_chunk, each * S + c,
                min(AT_ONCE, S - c), D,
            )  # fmt: skip
        part = gl.minimum(warp * EACH, ROW_PARTS - EACH) + each
        for i in gl.static_range(TILES * NT):
            d = sums[2 * i]
            e = sums[2 * i + 1]
            at = buffer + (i * ROW_PARTS + part) * PART_BYTES
            words = ()
            for j in gl.static_range(4):
                words = words + (as_word(d[j] + e[j]),)
            store_shared16(at + lane * 16, words, warp < ROW_PARTS)
            if NORM:
                square, there = diagonal(squares[i // TILES], lane)
                store_shared4(at + 512 + g * 4, square, there & (warp < ROW_PARTS))
    barrier()
    for i in gl.static_range(TILES * NT):  # a warp each
        n = first_row + (i % TILES * 16 + g)
        _store_rows(
            added_ptr, y_ptr, buffer + i * ROW_PARTS * PART_BYTES, warp == i % D.WARPS, lane,
            zero_f32, n, i // TILES * 8 + 2 * t, B, N, added_stride, eps, K, NORM,
        )  # fmt: skip


@gluon.jit
def _own_chunk(first_chunk, step, S: gl.constexpr):
    """Number of the chunk that a lane takes in one of its warp's steps."""
    return (first_chunk + step // S * 4 + step % S * (4 * ROW_PARTS)).to(gl.int64)


@gluon.jit
def _own_gains(gain_ptr, first_chunk, g, S: gl.constexpr, ALL: gl.constexpr):
    """Gains of the chunks that this lane stages: of its t in step g, g + 8 and so on."""
    gains = ()
    for first in gl.static_range(0, ALL if gain_ptr is not None else 0, 8):
        chunk = _own_chunk(first_chunk, gl.minimum(first + g, ALL - 1), S)
        gains = gains + (chunk_gains(gain_ptr, chunk),)
    return gains


@gluon.jit
def _stage(
    x_ptr, gains, staged, first_chunk, g, S: gl.constexpr, ALL: gl.constexpr
):  # fmt: skip
    """Put the warp's steps of one token into shared memory, normed as far as gains go and as is.

    staged: address of this lane's chunk of step 0; the next step's follows 64 bytes later, with
        gains behind all steps of all parts.
    """
    loaded = ()
    for first in gl.static_range(0, ALL, 8):
        chunk = _own_chunk(first_chunk, gl.minimum(first + g, ALL - 1), S)
        loaded = loaded + (load16(x_ptr.to(gl.int64, bitcast=True) + chunk * 16),)
    for first in gl.static_range(0, ALL, 8):
        w = loaded[first // 8]
        at = staged + (first + g) * 64
        inside = first + g < ALL
        store_shared16(at, w, inside)
        if len(gains) > 0:
            normed = times_gains(w, gains[first // 8])
            store_shared16(at + ROW_PARTS * S * 64, normed, inside)
    warp_barrier()


@gluon.jit
def _chunk(first_chunk, i: gl.constexpr, S: gl.constexpr, K: gl.constexpr, BYTES: gl.constexpr):
    """Offset of a warp's i-th chunk of BYTES, the last one's past the end; True if it exists."""
    chunk = first_chunk + (i // S * 4 + i % S * (4 * ROW_PARTS))
    if K % (32 * ROW_PARTS) != 0:
        at = gl.minimum(chunk, K // 8 - 1)
    else:
        at = chunk
    return at.to(gl.int64) * BYTES, chunk < K // 8


@gluon.jit
def _load_rows(
    loaded, rows, first_chunk, FIRST: gl.constexpr, END: gl.constexpr, S: gl.constexpr,
    K: gl.constexpr,
):  # fmt: skip
    """Append 16 bytes of every row to `loaded` for each of the steps from FIRST to END."""
    for i in gl.static_range(FIRST, END):
        at, _ = _chunk(first_chunk, i, S, K, 16)
        for row in gl.static_range(len(rows)):
            loaded = loaded + (stream16(rows[row] + at),)
    return loaded


@gluon.jit
def _add_rows(
    sums, squares, loaded, gain_ptr, sources, staged, first_chunk, FIRST: gl.constexpr,
    COUNT: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Sums of even and of odd products of a tile, and squares, with COUNT steps from FIRST on."""
    TILES: gl.constexpr = D.TILES
    S: gl.constexpr = D.STEPS
    K: gl.constexpr = D.K
    NT: gl.constexpr = len(sources)
    NORM: gl.constexpr = gain_ptr is not None
    x = ()
    scales = ()
    for c in gl.static_range(COUNT):
        at, _ = _chunk(first_chunk, FIRST + c, S, K, 16)
        if D.STAGED:
            x = x + (load_shared16(staged, (FIRST + c) * 64),)
            if NORM:
                scales = scales + (load_shared16(staged, (ROW_PARTS * S + FIRST + c) * 64),)
        elif NORM:
            chunk, _ = _chunk(first_chunk, FIRST + c, S, K, 1)
            scales = scales + (chunk_gains(gain_ptr, chunk),)
        for nt in gl.static_range(0 if D.STAGED else NT):
            x = x + (load16(sources[nt] + at),)
    for c in gl.static_range(COUNT):
        _, there = _chunk(first_chunk, FIRST + c, S, K, 16)
        new = ()
        new_squares = ()
        for nt in gl.static_range(NT):
            w = x[c * NT + nt]
            if K % (32 * ROW_PARTS) != 0:
                w = words_where(there, w)
            if NORM:
                new_squares = new_squares + (add_squares(squares[nt], w),)
                w = scales[c] if D.STAGED else times_gains(w, scales[c])
            for r in gl.static_range(TILES):
                a = loaded[2 * (TILES * (FIRST + c) + r)]
                b = loaded[2 * (TILES * (FIRST + c) + r) + 1]
                d = mma(sums[2 * (nt * TILES + r)], a[0], b[0], a[1], b[1], w[0], w[1])
                e = mma(sums[2 * (nt * TILES + r) + 1], a[2], b[2], a[3], b[3], w[2], w[3])
                new = new + (d, e)
        sums = new
        if NORM:
            squares = new_squares
    return sums, squares


@gluon.jit
def _store_rows(
    added_ptr, y_ptr, at, mine, lane, zero_f32, row, token, B, N, added_stride, eps,
    K: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Join the parts of 16 rows times 8 tokens and store them.

    mine: whether this warp stores them; row, token: this lane's first of both.
    """
    t = lane % 4
    y = sum_of_parts(at + lane * 16, ROW_PARTS, 34, 2)
    for i in gl.static_range(4):
        n = row + i // 2 * 8
        b = token + i % 2
        v = y[i]
        if NORM:
            square = zero_f32
            for part in gl.static_range(ROW_PARTS):
                square += load_shared4(at + (512 + i % 2 * 4) + t * 8, part * PART_BYTES)
            v *= norm_factor(square, eps, K)
        stored = mine & (b < B) & (n < N)
        if added_ptr is not None:
            v += gl.load(added_ptr + b * added_stride + n, mask=stored, other=0.0).to(gl.float32)
        gl.store(y_ptr + b * N + n, v.to(y_ptr.dtype.element_ty), mask=stored)


def dense_gemv_ref(
    x: Tensor,
    w: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
) -> Tensor:
    """The value `dense_gemv` approximates: [B, N] float64."""
    x = x.double() if norm is None else rms_norm_ref(x, norm, eps)
    y = x @ w.double().T
    return y if added is None else y + added.double()


@gluon.jit(do_not_specialize=["B", "N", "added_stride"])
def _dense_gemv_kernel(
    x_ptr, gain_ptr, w_ptr, added_ptr, y_ptr, B, N, added_stride, eps, BLOCKED: gl.constexpr,
    D: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """BLOCKED: there is more than one block of tokens."""
    warp, lane, zero, zero_f32 = threads(D.WARPS)
    number = gl.program_id(1)
    if BLOCKED:
        first = gl.program_id(0) * D.TOKENS
        x_ptr += first.to(gl.int64) * D.K
        y_ptr += first.to(gl.int64) * N
        B = B - first  # not of the other blocks
        if added_ptr is not None:
            added_ptr += first.to(gl.int64) * added_stride
    multiply_rows(
        x_ptr, gain_ptr, w_ptr, added_ptr, y_ptr, shared_buffer(SHARED) + zero,
        (number, warp, lane, zero_f32), B, N, added_stride, eps, D,
    )  # fmt: skip


def dense_gemv(
    x: Tensor,
    w: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`added + rms_norm(x) @ w.T` for a weight as stored; no other token changes a token's bits.

    Args:
        x: [B, K] bfloat16, contiguous.
        w: [N, K] bfloat16, contiguous; K is a multiple of 8.
        norm: [K] gain of the RMS norm; None leaves x as it is.
        added: [B, N] or [1, N], a residual or a bias, added in FP32 before the one rounding.
        dtype: of the result; None is x's.

    Returns:
        [B, N].

    Raises:
        UnsupportedModelError: another dtype, or K that is not a multiple of 8.
    """
    N, K = w.shape
    if w.dtype != torch.bfloat16 or K % CHUNK:
        raise UnsupportedModelError(
            f"a dense linear of {N} x {K} in {w.dtype} has no GPU kernel: expected bfloat16 and "
            f"columns in multiples of {CHUNK}",
            hint="run on the CPU with --device cpu",
        )
    B = x.shape[0]
    y = torch.empty((B, N), dtype=dtype or x.dtype, device=x.device)
    launch = dense_launch(N, power_of_two(B))
    blocks = -(-B // launch.tokens)
    pdl = programmatic_launch(x)
    needed = rows_bytes(launch, K)
    staged = B == 1 and K % 256 == 0 and N <= FEW_ROWS and needed <= STATIC_SHARED
    run(
        _dense_gemv_kernel,
        (blocks, -(-N // (16 * launch.tiles))),
        x,
        norm,
        w,
        added,
        y,
        B,
        N,
        0 if added is None or added.shape[0] == 1 else N,
        eps,
        BLOCKED=blocks > 1,
        D=rows_of(K, launch, WARPS, staged, pdl),
        SHARED=declaration(needed if staged else rows_bytes(launch)),
        num_warps=WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return y


def dense_gemm(x: Tensor, w: Tensor, added: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`added + x @ w.T` of many tokens by cuBLAS, rounded before a residual is added.

    Args:
        x: [M, K].
        w: [N, K].
        added: residual [M, N], or bias [1, N].
        dtype: of the result.
    """
    bias = added[0] if added is not None and added.shape[0] == 1 else None
    y = functional.linear(x, w, bias)
    return (y if added is None or bias is not None else added + y).to(dtype)
