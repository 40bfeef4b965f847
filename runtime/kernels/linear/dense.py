"""dense_gemv: y[b, n] = sum_k w[n, k] * x[b, k]     (few tokens, BF16 weights, FP32 sums).

Layout  w [N, K] and x [B, K] bf16 -> y [B, N]
Fused   RMS norm of x: x * gain is rounded to bf16 and rsqrt(mean(x^2) + eps) multiplies the result;
        residual + y or bias + y
Bytes   2*N*K;  N = 248320, K = 1024 (the head of a tied model): 509 MB = 112 us at 4.56 TB/s
Plan    a program takes 16 rows. BF16 as it is stored is what `mma` takes: a lane's 16 bytes of a
        row, and of the token of its column, are the chunk of 8 that it has of every 32 k. The steps
        of 32 k are dealt out to eight parts, which are summed apart and then joined in order,
        however many warps there are: every weight is read once, no atomics, so bit-reproducible,
        and a token has the same bits in any company. `multiply_rows` is also the first programs of
        a GEMV that has dense rows beside it
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
from lowbit.runtime.kernels.linear.norm import (
    add_squares,
    chunk_gains,
    diagonal,
    norm_factor,
    times_gains,
)
from lowbit.runtime.kernels.linear.products import sum_of_parts
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
from lowbit.runtime.thresholds import DENSE_TOKENS

WARPS = 8
FEW_ROWS = 1024  # up to which one token is staged in shared memory
CHUNK = 8  # columns that a lane loads together
ROW_PARTS = gl.constexpr(8)
PART_BYTES = gl.constexpr(512 + 32)  # of a part for 8 tokens: sums, and those of the squares
AT_ONCE = gl.constexpr(2)  # steps whose tokens are loaded together
AHEAD = gl.constexpr(8)  # steps whose rows are on their way


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Constants of a program that multiplies dense rows.

    Attributes:
        K: columns.
        TOKENS: that there is room for.
        WARPS: of the program.
        STAGED: whether each warp reads all of its part of one token at once and hands it round
            through shared memory; K is a multiple of 256 then. Else x is read from L2, AT_ONCE
            steps at a time.
        PDL: whether the kernel takes part in programmatic launch.
        EARLY: whether it has let the next kernel start before.
        STEPS: of 32 columns of a part.
        EACH: parts of a warp.
    """

    K: int
    TOKENS: int
    WARPS: int
    STAGED: bool
    PDL: bool
    EARLY: bool
    STEPS: int
    EACH: int


@cache
def rows_of(K: int, tokens: int, warps: int, staged: bool, pdl: bool, early: bool = False) -> Rows:
    """Constants of a program for so many columns and tokens."""
    steps, each = -(-K // (32 * ROW_PARTS.value)), -(-ROW_PARTS.value // warps)
    return Rows(K, tokens, warps, staged, pdl, early, steps, each)


def rows_bytes(tokens: int, staged: int = 0) -> int:
    """Shared-memory bytes of a program that multiplies dense rows; staged: elements of x."""
    return -(-tokens // 8) * 8 * (512 + 32) + 4 * staged


@gluon.jit
def multiply_rows(
    x_ptr, gain_ptr, rows_ptr, added_ptr, y_ptr, buffer, own, B, N, added_stride, eps,
    D: gl.constexpr,
):  # fmt: skip
    """16 of N rows of `added + rms_norm(x) @ rows.T`, by the program of that number, for B tokens.

    Squares of the norm are the diagonal of tokens times tokens.

    own: warp, lane and zero of each thread.
    """
    warp, lane, none = own
    K: gl.constexpr = D.K
    S: gl.constexpr = D.STEPS
    EACH: gl.constexpr = D.EACH
    ALL: gl.constexpr = EACH * S
    NT: gl.constexpr = (D.TOKENS + 7) // 8
    NORM: gl.constexpr = gain_ptr is not None
    g = lane // 4
    t = lane % 4
    n = gl.program_id(0) * 16 + g
    rows = rows_ptr.to(gl.int64, bitcast=True)
    low = rows + gl.minimum(n, N - 1).to(gl.int64) * (2 * K)
    high = rows + gl.minimum(n + 8, N - 1).to(gl.int64) * (2 * K)
    first_chunk = gl.minimum(warp * EACH, ROW_PARTS - EACH) * 4 + t
    loaded = _load_rows((), low, high, first_chunk, 0, min(AHEAD, ALL), S, K)
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
        for _i in gl.static_range(3 * NT):
            sums = sums + ((none, none, none, none),)
        for c in gl.static_range(0, S, AT_ONCE):
            loaded = _load_rows(
                loaded, low, high, first_chunk, len(loaded) // 2,
                min(ALL, each * S + c + AHEAD), S, K,
            )  # fmt: skip
            sums = _add_rows(
                sums, loaded, gain_ptr, sources, staged, first_chunk, each * S + c,
                min(AT_ONCE, S - c), D,
            )  # fmt: skip
        part = gl.minimum(warp * EACH, ROW_PARTS - EACH) + each
        for nt in gl.static_range(NT):
            d = sums[3 * nt]
            e = sums[3 * nt + 1]
            at = buffer + (nt * ROW_PARTS + part) * PART_BYTES
            words = ()
            for i in gl.static_range(4):
                words = words + (as_word(d[i] + e[i]),)
            store_shared16(at + lane * 16, words, warp < ROW_PARTS)
            if NORM:
                own, there = diagonal(sums[3 * nt + 2], lane)
                store_shared4(at + 512 + g * 4, own, there & (warp < ROW_PARTS))
    barrier()
    for nt in gl.static_range(NT):
        _store_rows(
            added_ptr, y_ptr, buffer + nt * ROW_PARTS * PART_BYTES, warp, lane, none, B, N,
            added_stride, eps, nt, K, NORM,
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
    loaded, low, high, first_chunk, FIRST: gl.constexpr, END: gl.constexpr, S: gl.constexpr,
    K: gl.constexpr,
):  # fmt: skip
    """Append 16 bytes of two rows to `loaded` for each of the steps from FIRST to END."""
    for i in gl.static_range(FIRST, END):
        at, _ = _chunk(first_chunk, i, S, K, 16)
        loaded = loaded + (stream16(low + at), stream16(high + at))
    return loaded


@gluon.jit
def _add_rows(
    sums, loaded, gain_ptr, sources, staged, first_chunk, FIRST: gl.constexpr,
    COUNT: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Sums with COUNT steps from FIRST on: even and odd products of a row, and squares."""
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
        a = loaded[2 * (FIRST + c)]
        b = loaded[2 * (FIRST + c) + 1]
        _, there = _chunk(first_chunk, FIRST + c, S, K, 16)
        new = ()
        for nt in gl.static_range(NT):
            w = x[c * NT + nt]
            if K % (32 * ROW_PARTS) != 0:
                w = words_where(there, w)
            squares = sums[3 * nt + 2]
            if NORM:
                squares = add_squares(squares, w)
                w = scales[c] if D.STAGED else times_gains(w, scales[c])
            d = mma(sums[3 * nt], a[0], b[0], a[1], b[1], w[0], w[1])
            e = mma(sums[3 * nt + 1], a[2], b[2], a[3], b[3], w[2], w[3])
            new = new + (d, e, squares)
        sums = new
    return sums


@gluon.jit
def _store_rows(
    added_ptr, y_ptr, at, warp, lane, none, B, N, added_stride, eps, nt: gl.constexpr,
    K: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Join the parts of 16 rows times 8 tokens and store them."""
    g = lane // 4
    t = lane % 4
    y = sum_of_parts(at + lane * 16, ROW_PARTS, 34, 2)
    for i in gl.static_range(4):
        n = gl.program_id(0) * 16 + i // 2 * 8 + g
        b = nt * 8 + 2 * t + i % 2
        v = y[i]
        if NORM:
            square = none
            for part in gl.static_range(ROW_PARTS):
                square += load_shared4(at + (512 + i % 2 * 4) + t * 8, part * PART_BYTES)
            v *= norm_factor(square, eps, K)
        stored = (warp == 0) & (b < B) & (n < N)
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
    x_ptr, gain_ptr, w_ptr, added_ptr, y_ptr, B, N, added_stride, eps,
    D: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    warp, lane, zero, none = threads(D.WARPS)
    multiply_rows(
        x_ptr, gain_ptr, w_ptr, added_ptr, y_ptr, shared_buffer(SHARED) + zero, (warp, lane, none),
        B, N, added_stride, eps, D,
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
    """`added + rms_norm(x) @ w.T` for a weight as stored, read once for every 16 tokens.

    Args:
        x: [B, K] bfloat16, contiguous.
        w: [N, K] bfloat16, contiguous; K is a multiple of 8.
        norm: [K] gain of the RMS norm; None leaves x as it is.
        eps: of the norm.
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
    y = torch.empty((x.shape[0], N), dtype=dtype or x.dtype, device=x.device)
    for first in range(0, x.shape[0], DENSE_TOKENS):
        part = slice(first, first + DENSE_TOKENS)
        of_part = added if added is None or added.shape[0] == 1 else added[part]
        _launch(x[part], w, norm, eps, of_part, y[part])
    return y


def _launch(
    x: Tensor, w: Tensor, norm: Tensor | None, eps: float, added: Tensor | None, y: Tensor
) -> None:
    B, (N, K) = x.shape[0], w.shape
    tokens = power_of_two(B)
    pdl = programmatic_launch(x)
    needed = rows_bytes(tokens, K)
    staged = tokens == 1 and K % 256 == 0 and N <= FEW_ROWS and needed <= STATIC_SHARED
    run(
        _dense_gemv_kernel,
        (-(-N // 16),),
        x,
        norm,
        w,
        added,
        y,
        B,
        N,
        0 if added is None or added.shape[0] == 1 else N,
        eps,
        D=rows_of(K, tokens, WARPS, staged, pdl),
        SHARED=declaration(needed if staged else rows_bytes(tokens)),
        num_warps=WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )


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
