"""gemv: y[b, n] = sum_k scale[n, k / G] * code[n, k] * x[b, k]     (few tokens, FP32 sums).

Layout  weight in tiles of 16 rows (`tiles`), x [B, K] bf16 -> y [B, N]
Fused   RMS norm of x: x * gain is rounded to bf16 and rsqrt(mean(x^2) + eps) multiplies the result,
        or norms of its heads, whose sums of squares are given, before x becomes digits;
        residual + y or bias + y; silu(gate) * up for a paired weight
Bytes   N*K*bits/8 + 2*N*K/G; INT4, N = K = 4096, G = 128: 8.65 MB = 1.9 us at 4.56 TB/s
Plan    a program takes R tiles over the whole of K; its warps take the steps in turn. Of one
        token x goes through shared memory as three digits, and bytes are multiplied
        (`gemv_digits`); up to eight tokens are the columns of one `mma`, whose codes widen to
        BF16 pairs (`gemv_steps`). Scales multiply FP32 sums. Weights are on their way before the
        kernel waits for its predecessor. Warps are summed in order; no atomics, so
        bit-reproducible
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.access import (
    barrier,
    declaration,
    shared_buffer,
    store_shared4,
    store_shared8,
    store_shared16,
)
from lowbit.runtime.kernels.device import programmatic_launch, register_cap, run
from lowbit.runtime.kernels.gemv_digits import (
    TOP_WEIGHT,
    digit_bytes,
    multiply_digits,
    plane_bytes,
    stage_digits,
)
from lowbit.runtime.kernels.gemv_rows import multiply_rows
from lowbit.runtime.kernels.gemv_stage import (
    chunks_of,
    head_factors,
    load_gains,
    sum_of_parts,
    total_of,
)
from lowbit.runtime.kernels.gemv_steps import load_steps, multiply_steps
from lowbit.runtime.kernels.launch import GemvLaunch, gemv_launch
from lowbit.runtime.kernels.mma import across, as_word, threads
from lowbit.runtime.kernels.rows import rms_norm
from lowbit.runtime.kernels.tiles import TiledLinear, dequantized

MOST_TOKENS = 32  # of a program
MOST_STAGED = 14336  # of K: 43 KB, and all of a program's shared memory may be 48
SCALES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def gemv_ref(
    x: Tensor,
    w: TiledLinear,
    *,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
) -> Tensor:
    """The value `gemv` approximates: [B, N] float64 on the exact stored codes."""
    x = x.double()
    if squares is not None:
        heads = x.view(squares.shape[0], -1)
        mean = squares.double().sum(-1, keepdim=True) / heads.shape[1]
        x = (heads * torch.rsqrt(mean + eps)).view(x.shape)
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.double()
    y = x @ dequantized(w).double().T
    return y if added is None else y + added.double()


@gluon.jit(do_not_specialize=["B", "N", "tiles", "added_stride"])
def _gemv_kernel(
    x_ptr, gain_ptr, head_squares_ptr, words_ptr, scales_ptr, added_ptr, rows_ptr, y_ptr,
    rows_y_ptr, B, N, tiles, added_stride, eps,
    SWIGLU: gl.constexpr, MOST: gl.constexpr, K: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr,
    SCALES: gl.constexpr, HEAD: gl.constexpr, ROWS: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
    WARPS: gl.constexpr, ABREAST: gl.constexpr, SHARED: gl.constexpr, X_BYTES: gl.constexpr,
    PLANE: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """MOST: tokens that there is room for, 1 or a multiple of 8, of which B are there.

    HEAD: elements of x that are normed by one of the sums of squares, where those are given.

    X_BYTES: of shared memory that x takes; 0 where every lane reads x itself.
    """
    if PDL and EARLY:
        gdc_launch_dependents()
    warp, lane, zero, none = threads(WARPS)
    buffer = shared_buffer(SHARED) + zero
    first: gl.constexpr = (ROWS + 15) // 16  # programs with dense rows: they take longest
    if ROWS > 0 and gl.program_id(0) < first:
        multiply_rows(
            x_ptr, gain_ptr, rows_ptr, rows_y_ptr, buffer, warp, lane, none, eps,
            ROWS, K, WARPS, X_BYTES, PDL, EARLY,
        )  # fmt: skip
    else:
        _multiply_tiles(
            x_ptr, gain_ptr, head_squares_ptr, words_ptr, scales_ptr, added_ptr, y_ptr, B, N, tiles,
            added_stride, eps, gl.program_id(0) - first, buffer, warp, lane, none,
            SWIGLU, MOST, K, G, BITS, SCALES, HEAD, R, C, WARPS, ABREAST, X_BYTES, PLANE, PDL,
            EARLY,
        )  # fmt: skip


@gluon.jit
def _multiply_tiles(
    x_ptr, gain_ptr, head_squares_ptr, words_ptr, scales_ptr, added_ptr, y_ptr, B, N, tiles,
    added_stride, eps, program, buffer, warp, lane, none,
    SWIGLU: gl.constexpr, MOST: gl.constexpr, K: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr,
    SCALES: gl.constexpr, HEAD: gl.constexpr, R: gl.constexpr, C: gl.constexpr, WARPS: gl.constexpr,
    ABREAST: gl.constexpr, X_BYTES: gl.constexpr, PLANE: gl.constexpr, PDL: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """What one program does of the packed weight."""
    STAGED: gl.constexpr = X_BYTES > 0
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    GROUPS: gl.constexpr = (K + G - 1) // G
    PARTS: gl.constexpr = WARPS // ABREAST  # of a tile's steps
    S: gl.constexpr = (STEPS + PARTS - 1) // PARTS
    COLUMNS: gl.constexpr = 1 if MOST == 1 else 2  # of a lane's two tokens
    NT: gl.constexpr = (MOST + 7) // 8
    ITEMS: gl.constexpr = ABREAST * R * NT  # blocks of 16 results by 8 tokens
    FP32: gl.constexpr = gain_ptr is not None and gain_ptr.dtype.element_ty == gl.float32
    SCALE_WORDS: gl.constexpr = 2 if SCALES == "fp32" else 1
    g = lane // 4
    t = lane % 4
    part = warp % PARTS
    first_tile = program * (ABREAST * R)
    words = ()
    scales = ()
    for r in gl.static_range(R):
        tile = gl.minimum(first_tile + warp // PARTS * R + r, tiles - 1).to(gl.int64)
        at = tile * (STEPS * 1024) + part * 1024 + lane * 16
        words = words + (words_ptr.to(gl.int64, bitcast=True) + at,)
        at = (tile * (GROUPS * 8) + g) * (SCALE_WORDS * 4)
        scales = scales + (scales_ptr.to(gl.int64, bitcast=True) + at,)
    loaded, raw = load_steps(
        words, scales, part, 0, G, BITS, K, R, C if C < S else S, PARTS, SCALES
    )  # fmt: skip
    thread = warp * 32 + lane
    gains = load_gains(gain_ptr, thread, K, WARPS * 32)

    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()

    added = ()
    if added_ptr is not None:
        for first in gl.static_range(0, ITEMS, WARPS):
            for i in gl.static_range(2 * COLUMNS):
                n = (first_tile + (first + warp) // NT) * 16 + i // COLUMNS * 8 + g
                b = (first + warp) % NT * 8 + 2 * t + i % COLUMNS
                at = gl.minimum(n, N - 1)
                if MOST > 1:
                    at += gl.minimum(b, B - 1) * added_stride
                added = added + (gl.load(added_ptr + at).to(gl.float32),)
    sources = ()
    factor = none + (1.0 if BITS == 8 or not STAGED else 0.0625)  # digits meet 16 times the code
    sums_at = buffer
    if STAGED:
        of_heads = ()
        if head_squares_ptr is not None:
            of_heads = head_factors(head_squares_ptr, thread, eps, K, WARPS * 32, HEAD)
        chunks, squares = chunks_of(
            x_ptr, gains, thread, lane, none, K, WARPS * 32, gain_ptr is not None, FP32
        )
        stage_digits(chunks, of_heads, buffer, thread, lane, K, WARPS * 32, BITS, PLANE)
        sums_at += X_BYTES
        if gain_ptr is not None:
            store_shared4(sums_at + thread * 4, squares, thread >= 0)
        barrier()
        if gain_ptr is not None:
            factor *= gl.rsqrt(total_of(sums_at + lane * 4, none, WARPS) / K + eps)
            sums_at += WARPS * 128
    else:
        for nt in gl.static_range(NT):
            token = gl.minimum(nt * 8 + g, B - 1).to(gl.int64)
            at = token * (2 * K) + t * 16 + part * (1024 // BITS)
            sources = sources + (x_ptr.to(gl.int64, bitcast=True) + at,)
    digits = buffer + gl.minimum(g, 2) * PLANE + t * 16 + part * (512 // BITS)
    mixed = gl.where(t == 0, 256, 0)
    acc = ()
    for i in gl.static_range(R * NT):
        acc = acc + ((none, none) if STAGED else (none, none, none, none),)
    for first in gl.static_range(0, S, C):
        if first + C < S:
            next_loaded, next_raw = load_steps(
                words, scales, part, first + C, G, BITS, K, R,
                C if first + 2 * C <= S else S - first - C, PARTS, SCALES,
            )  # fmt: skip
        if STAGED:
            acc = multiply_digits(
                acc, loaded, raw, digits, buffer + 3 * PLANE, part, mixed, first,
                C if first + C <= S else S - first, G, BITS, K, R, PARTS, SCALES,
            )  # fmt: skip
        else:
            acc = multiply_steps(
                acc, loaded, raw, sources, part, none, first,
                C if first + C <= S else S - first, G, BITS, K, R, NT, PARTS, SCALES,
            )  # fmt: skip
        if first + C < S:
            loaded = next_loaded
            raw = next_raw

    HELD: gl.constexpr = 8 if COLUMNS == 1 else 32  # lanes with results
    held = t == 0 if COLUMNS == 1 else t >= 0
    slot = g if COLUMNS == 1 else lane
    for i in gl.static_range(R * NT):
        a = acc[i]
        item = warp // PARTS * (R * NT) + i
        at = sums_at + ((item * PARTS + part) * HELD + slot) * (8 * COLUMNS)
        if STAGED:
            low = a[0] + TOP_WEIGHT * across(a[0], 1)
            high = a[1] + TOP_WEIGHT * across(a[1], 1)
            store_shared8(at, (as_word(low), as_word(high)), held)
        elif COLUMNS == 1:
            store_shared8(at, (as_word(a[0]), as_word(a[2])), held)
        else:
            words_of = (as_word(a[0]), as_word(a[1]), as_word(a[2]), as_word(a[3]))
            store_shared16(at, words_of, held)
    barrier()
    for first in gl.static_range(0, ITEMS, WARPS):
        item = first + warp
        at = sums_at + (gl.minimum(item, ITEMS - 1) * PARTS * HELD + slot) * (8 * COLUMNS)
        y = sum_of_parts(at, none, PARTS, HELD, COLUMNS)  # rows g: tokens 2 t..., then rows g + 8
        for column in gl.static_range(COLUMNS):
            b = item % NT * 8 + 2 * t + column
            low = y[column] * factor
            high = y[COLUMNS + column] * factor
            stored = held & (item < ITEMS)
            if MOST > 1:
                stored = stored & (b < B)
            if SWIGLU:
                n = (first_tile + item // NT) * 8 + g
                act = low * high / (1.0 + gl.exp(-low))
                at = y_ptr + b * (N // 2) + n
                gl.store(at, act.to(y_ptr.dtype.element_ty), mask=stored & (n < N // 2))
            else:
                for half in gl.static_range(2):
                    n = (first_tile + item // NT) * 16 + half * 8 + g
                    v = low if half == 0 else high
                    if added_ptr is not None:
                        v += added[(first // WARPS * 2 + half) * COLUMNS + column]
                    at = y_ptr + b * N + n
                    gl.store(at, v.to(y_ptr.dtype.element_ty), mask=stored & (n < N))


def gemv(
    x: Tensor,
    w: TiledLinear,
    *,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`added + rms_norm(x) @ w.T`; `silu(gate) * up` of it for a paired weight.

    Args:
        x: [B, K] bfloat16, contiguous; the weight is read once for every 32 tokens.
        w: [N, K].
        norm: [K] gain of the RMS norm; None leaves x as it is. Of several tokens, or K above
            14,336, a kernel before norms.
        squares: [heads, SQUARES] float32, parts of the sum of the squares that norm each head of
            x, which need not be those of x; of one token, K up to 14,336, without `norm`.
        eps: of the norm.
        added: [B, N] or [1, N], a residual or a bias, added in FP32 before the one rounding.
        dtype: of the result; None is x's.

    Returns:
        [B, N], or [B, N / 2].
    """
    B = x.shape[0]
    if squares is not None and (norm is not None or not _staged(B, w)):
        raise ValueError("squares are for one token, K up to 14,336 and no other norm")
    y = torch.empty((B, w.N // (2 if w.paired else 1)), dtype=dtype or x.dtype, device=x.device)
    if norm is not None and not _staged(B, w):  # the kernel norms what it stages
        x, norm = rms_norm(x, norm, eps), None
    if B <= MOST_TOKENS:
        _launch(x, w, norm, eps, added, y, squares)
        return y
    for first in range(0, B, MOST_TOKENS):
        part = slice(first, first + MOST_TOKENS)
        of_part = added if added is None or added.shape[0] == 1 else added[part]
        _launch(x[part], w, norm, eps, of_part, y[part])
    return y


def gemv_and_rows(
    x: Tensor, w: TiledLinear, rows: Tensor, *, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x) @ w.T` and `rms_norm(x) @ rows.T` of one token, in one kernel.

    Args:
        x: [1, K] bfloat16, contiguous; K is at most 14,336.
        w: [N, K], not paired.
        rows: [n, K] bfloat16, few: a program takes 16 of them.
        norm: [K] gain of the RMS norm.
        eps: of the norm.

    Returns:
        [1, N] and [1, n] in x's dtype.
    """
    y, rows_y = x.new_empty((1, w.N)), x.new_empty((1, rows.shape[0]))
    _launch(x, w, norm, eps, None, y, None, rows, rows_y)
    return y, rows_y


def _staged(B: int, w: TiledLinear) -> bool:
    """Whether x goes through shared memory."""
    return B == 1 and w.K <= MOST_STAGED


def _launch(
    x: Tensor,
    w: TiledLinear,
    norm: Tensor | None,
    eps: float,
    added: Tensor | None,
    y: Tensor,
    squares: Tensor | None = None,
    rows: Tensor | None = None,
    rows_y: Tensor | None = None,
) -> None:
    B, staged = x.shape[0], _staged(x.shape[0], w)
    x_bytes = digit_bytes(w.K) if staged else 0
    launch = gemv_launch(w.bits, w.tiles, w.steps, B)
    ROWS = 0 if rows is None else rows.shape[0]
    pdl = programmatic_launch(x)
    registers = register_cap(x, launch.registers)
    if w.K > MOST_STAGED:  # under a cap rows so long spill
        registers = None
    run(
        _gemv_kernel,
        (-(-w.tiles // (launch.tiles * launch.abreast)) + -(-ROWS // 16),),
        x,
        norm,
        squares,
        w.words,
        w.scales.view(torch.int32),
        added,
        rows,
        y,
        rows_y,
        B,
        w.N,
        w.tiles,
        0 if added is None or added.shape[0] == 1 else w.N,
        eps,
        SWIGLU=w.paired,
        MOST=1 if B == 1 else -(-B // 8) * 8,
        K=w.K,
        G=w.group_size,
        BITS=w.bits,
        SCALES=SCALES[w.scales.dtype],
        HEAD=0 if squares is None else w.K // squares.shape[0],
        ROWS=ROWS,
        R=launch.tiles,
        C=launch.steps,
        WARPS=launch.warps,
        ABREAST=launch.abreast,
        SHARED=declaration(
            max(
                launch.shared << 10 if pdl else 0,
                shared_bytes(w.K, launch, B, staged and norm is not None),
            )
        ),
        X_BYTES=x_bytes,
        PLANE=plane_bytes(w.K),
        PDL=pdl,
        EARLY=launch.early,
        num_warps=launch.warps,
        maxnreg=registers,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )


def shared_bytes(K: int, launch: GemvLaunch, B: int, normed: bool) -> int:
    """Shared memory a program needs: x, squares of each thread, sums of each warp."""
    x = digit_bytes(K) if B == 1 and K <= MOST_STAGED else 0
    squares = 128 * launch.warps if normed else 0
    return x + squares + launch.warps * launch.tiles * -(-B // 8) * (64 if B == 1 else 512)
