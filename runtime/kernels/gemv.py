"""gemv: y[b, n] = sum_k scale[n, k / G] * code[n, k] * x[b, k]     (few tokens, FP32 sums).

Layout  weight in tiles of 16 rows (`tiles`), x [B, K] bf16 -> y [B, N]
Fused   RMS norm of x: x * gain is rounded to bf16 and rsqrt(mean(x^2) + eps) multiplies the result;
        residual + y or bias + y; silu(gate) * up for a paired weight
Bytes   N*K*bits/8 + 2*N*K/G; INT4, N = K = 4096, G = 128: 8.65 MB = 1.9 us at 4.56 TB/s
Plan    a program takes R tiles over the whole of K; its warps take the steps in turn. Codes widen
        to BF16 pairs (`mma`), up to eight tokens are the columns of one `mma`, scales multiply
        FP32 sums. Weights are on their way before the kernel waits for its predecessor;
        x goes through shared memory once. Warps are summed in order; no atomics, so
        bit-reproducible
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.device import programmatic_launch
from lowbit.runtime.kernels.gemv_stage import load_gains, stage_x
from lowbit.runtime.kernels.gemv_steps import load_steps, multiply_steps
from lowbit.runtime.kernels.launch import gemv_launch
from lowbit.runtime.kernels.mma import barrier, declaration, shared_buffer
from lowbit.runtime.kernels.rows import rms_norm
from lowbit.runtime.kernels.tiles import TiledLinear, dequantized

OLDER_REGISTERS = 168  # before Hopper the compiler spills for occupancy in more launches
MOST_STAGED = 20480  # of K: 40 KB, and all of a program's shared memory may be 48
SCALES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def gemv_ref(
    x: Tensor,
    w: TiledLinear,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
) -> Tensor:
    """The value `gemv` approximates: [B, N] float64 on the exact stored codes."""
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.double()
    y = x @ dequantized(w).double().T
    return y if added is None else y + added.double()


@gluon.jit(do_not_specialize=["N", "tiles", "added_stride"])
def _gemv_kernel(
    x_ptr, gain_ptr, words_ptr, scales_ptr, added_ptr, y_ptr, N, tiles, added_stride, eps,
    SWIGLU: gl.constexpr, B: gl.constexpr, K: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr,
    SCALES: gl.constexpr, R: gl.constexpr, C: gl.constexpr, WARPS: gl.constexpr,
    SHARED: gl.constexpr, RAW: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    GROUPS: gl.constexpr = (K + G - 1) // G
    S: gl.constexpr = (STEPS + WARPS - 1) // WARPS
    STAGED: gl.constexpr = SHARED is not None
    COLUMNS: gl.constexpr = 1 if B == 1 else 2  # of a lane's two tokens
    NT: gl.constexpr = (B + 7) // 8
    SCALE_WORDS: gl.constexpr = 2 if SCALES == "fp32" else 1
    if PDL and EARLY:
        gdc_launch_dependents()

    zero = gl.full([WARPS, 32], 0, gl.int32, layout=L)
    none = gl.full([WARPS, 32], 0.0, gl.float32, layout=L)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, L))[:, None] + zero
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :] + zero
    g = lane // 4
    t = lane % 4
    program = gl.program_id(0)
    words = ()
    scales = ()
    for r in gl.static_range(R):
        tile = gl.minimum(program * R + r, tiles - 1).to(gl.int64)
        words = words + (words_ptr.to(gl.int64, bitcast=True) + tile * (STEPS * 1024) + lane * 16,)
        scales = scales + (scales_ptr + (tile * (GROUPS * 8) + g) * SCALE_WORDS,)
    loaded, raw = load_steps(words, scales, warp, G, BITS, K, R, C if C < S else S, WARPS, SCALES)
    thread = warp * 32 + lane
    gains = load_gains(gain_ptr, thread, K, WARPS * 32)

    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()

    OUT: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, 2 * COLUMNS], [1, 32, 1], [1, 1, WARPS], [2, 1, 0]
    )
    LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, OUT))
    out_g = gl.arange(0, 32, layout=LANES) // 4
    out_t = gl.arange(0, 32, layout=LANES) % 4
    added = ()
    if added_ptr is not None:
        for i in gl.static_range(R * NT * 2 * COLUMNS):
            n = (program * R + i // (NT * 2 * COLUMNS)) * 16 + i // COLUMNS % 2 * 8 + out_g
            b = i // (2 * COLUMNS) % NT * 8 + 2 * out_t + i % COLUMNS
            at = gl.minimum(b, B - 1) * added_stride + gl.minimum(n, N - 1)
            added = added + (gl.load(added_ptr + at).to(gl.float32),)
    sources = ()
    squares = none
    units = None
    if STAGED:
        buffer = shared_buffer(SHARED) + zero
        squares = stage_x(
            x_ptr, gains, buffer, thread, none, K, WARPS * 32, gain_ptr is not None, RAW
        )
        barrier()
        sources = (buffer + t * 16,)
        units = buffer + 2 * K if RAW else None
    else:
        for nt in gl.static_range(NT):
            token = gl.minimum(nt * 8 + g, B - 1).to(gl.int64)
            sources = sources + (x_ptr.to(gl.int64, bitcast=True) + token * (2 * K) + t * 16,)
    acc = ()
    for i in gl.static_range(R * NT):
        acc = acc + ((none, none, none, none),)
    for first in gl.static_range(0, S, C):
        if first + C < S:
            next_loaded, next_raw = load_steps(
                words, scales, warp + (first + C) * WARPS, G, BITS, K, R,
                C if first + 2 * C <= S else S - first - C, WARPS, SCALES,
            )  # fmt: skip
        acc = multiply_steps(
            acc, loaded, raw, sources, warp + first * WARPS, none, (first + C) * WARPS > STEPS,
            C if first + C <= S else S - first, G, BITS, K, R, NT, WARPS, SCALES, STAGED, units,
        )  # fmt: skip
        if first + C < S:
            loaded = next_loaded
            raw = next_raw

    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    shared = ()
    for i in gl.static_range(R * NT):
        a = acc[i]
        if COLUMNS == 1:
            stacked = gl.join(a[0], a[2])
        else:
            stacked = gl.reshape(gl.join(gl.join(a[0], a[2]), gl.join(a[1], a[3])), [WARPS, 32, 4])
        part = gl.allocate_shared_memory(gl.float32, [WARPS, 32, 2 * COLUMNS], FLAT)
        part.store(stacked)
        shared = shared + (part,)
    if gain_ptr is not None:
        square_sums = gl.allocate_shared_memory(gl.float32, [WARPS, 32, 1], FLAT)
        square_sums.store(gl.reshape(gl.sum(squares, axis=1)[:, None] + none, [WARPS, 32, 1]))
        total = gl.sum(gl.sum(square_sums.load(OUT), axis=2), axis=0)
        factor = gl.rsqrt(gl.convert_layout(total, LANES) / K + eps)
    for i in gl.static_range(R * NT):
        y = gl.sum(shared[i].load(OUT), axis=0)  # [32, 2 * COLUMNS]
        values = _split(y, COLUMNS, LANES)
        for column in gl.static_range(COLUMNS):
            b = i % NT * 8 + 2 * out_t + column
            low = values[2 * column]
            high = values[2 * column + 1]
            if gain_ptr is not None:
                low *= factor
                high *= factor
            if SWIGLU:
                n = (program * R + i // NT) * 8 + out_g
                act = low * high / (1.0 + gl.exp(-low))
                stored = (n < N // 2) & (b < B)
                gl.store(y_ptr + b * (N // 2) + n, act.to(y_ptr.dtype.element_ty), mask=stored)
            else:
                for half in gl.static_range(2):
                    n = (program * R + i // NT) * 16 + half * 8 + out_g
                    v = low if half == 0 else high
                    if added_ptr is not None:
                        v += added[(i * 2 + half) * COLUMNS + column]
                    stored = (n < N) & (b < B)
                    gl.store(y_ptr + b * N + n, v.to(y_ptr.dtype.element_ty), mask=stored)


@gluon.jit
def _split(y, COLUMNS: gl.constexpr, LANES: gl.constexpr):
    """[32, 2 * COLUMNS] to a tensor of 32 for each column and half."""
    if COLUMNS == 1:
        low, high = gl.split(y)
        values = (low, high)
    else:
        even, odd = gl.split(gl.reshape(y, [32, 2, 2]))
        low0, high0 = gl.split(even)
        low1, high1 = gl.split(odd)
        values = (low0, high0, low1, high1)
    lanes = ()
    for i in gl.static_range(2 * COLUMNS):
        lanes = lanes + (gl.convert_layout(values[i], LANES),)
    return lanes


def gemv(
    x: Tensor,
    w: TiledLinear,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`added + rms_norm(x) @ w.T` for 1 to 32 tokens; `silu(gate) * up` of it for a paired weight.

    Args:
        x: [B, K] bfloat16, contiguous.
        w: [N, K].
        norm: [K] gain of the RMS norm; None leaves x as it is. Of several tokens, or K above
            20,480, a kernel before norms.
        eps: of the norm.
        added: [B, N] or [1, N], a residual or a bias, added in FP32 before the one rounding.
        dtype: of the result; None is x's.

    Returns:
        [B, N], or [B, N / 2].
    """
    B = x.shape[0]
    y = torch.empty((B, w.N // (2 if w.paired else 1)), dtype=dtype or x.dtype, device=x.device)
    launch = gemv_launch(w.tiles, w.steps, B)
    staged = B == 1 and w.K <= MOST_STAGED
    if norm is not None and not staged:  # the kernel norms what it stages
        x, norm = rms_norm(x, norm, eps), None
    pdl = programmatic_launch(x)
    registers = launch.registers if pdl else launch.registers or OLDER_REGISTERS
    if w.K > MOST_STAGED:  # every lane holds its own x
        registers = None
    _gemv_kernel[(-(-w.tiles // launch.tiles),)](
        x,
        norm,
        w.words,
        w.scales.view(torch.int32),
        added,
        y,
        w.N,
        w.tiles,
        0 if added is None or added.shape[0] == 1 else w.N,
        eps,
        SWIGLU=w.paired,
        B=B,
        K=w.K,
        G=w.group_size,
        BITS=w.bits,
        SCALES=SCALES[w.scales.dtype],
        R=launch.tiles,
        C=launch.steps,
        WARPS=launch.warps,
        SHARED=declaration(2 * w.K + w.K // 8) if staged else None,
        RAW=launch.raw and staged and w.K * w.bits % 512 == 0,  # no padded columns
        PDL=pdl,
        EARLY=launch.early,
        num_warps=launch.warps,
        maxnreg=registers,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return y
