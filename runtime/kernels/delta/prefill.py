"""delta_prefill: M tokens of prompts through a gated DeltaNet layer, in chunks of 64.

In a chunk, with G the running sum of g and D[i, j] = exp(G[i] - G[j]) for j <= i, else 0:
    T      = (I + beta * D * (k . k^T) below the diagonal)^-1
    new    = T @ (beta * (v - exp(G) * k @ S))           (what the tokens write, each at its k)
    o      = exp(G) * q @ S + (D * (q . k^T)) @ new
    S      = exp(G[-1]) * S + (exp(G[-1] - G) * k)^T @ new
which is the recurrence of `delta_decode` with its sums in another order.

Layout  qkvz [M, C + Hv * Dv] bf16, ba [M, 2 * Hv]; slots: memory [S, Hv, Dk, Dv] fp32, window
        [S, W - 1, C] bf16
Plan    Chunks begin at each sequence's first token; its state comes from one slot and goes to
        another or the same. Four kernels: `mix` convolves and norms q, k, v, a program per tokens
        and head; `chunk` computes all that does not need S, a program per chunk and value head;
        `scan` carries S through the chunks, a program per value head, some columns of S, and
        sequence; `gated_norm` ends the layer and moves the windows. Between them everything is
        FP32, and a product is three of BF16, which take 16 bits of each number: S errs by some 6e-6
        of its norm. Tokens past the end have k = v = beta = g = 0, which leaves S as it is. Starts
        and end are read from the step's tensors (`sequences`); M rows may have padding behind the
        end, which no state sees
Bits    of a sequence, its state and window, are those that it has alone
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.kernels.delta.heads import gates
from lowbit.runtime.kernels.delta.out import gated_norm
from lowbit.runtime.kernels.delta.program import L2_EPS, sizes_of
from lowbit.runtime.kernels.delta.sequences import chunk_of, chunks_before, sequence_number
from lowbit.runtime.kernels.launch.delta import BLOCK_K, BLOCK_M, CHUNK, scan_launch
from lowbit.runtime.kernels.launch.device import card_of, run
from lowbit.runtime.state.delta import LayerStates
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import DeltaLayer


@triton.jit
def _convolved(qkvz_ptr, windows, taps_ptr, tokens, first, M, channels, SIZES: tl.constexpr):
    """Convolution and SiLU of channels of tokens, in FP32.

    first: token of each token's sequence, before which its window comes.
    windows: addresses of these, of all tokens or of each [BLOCK_M, 1].
    """
    C: tl.constexpr = SIZES.C
    W: tl.constexpr = SIZES.W
    y = tl.zeros([tokens.shape[0], channels.shape[0]], tl.float32)
    for tap in tl.static_range(W):
        row = tokens + (tap - (W - 1))
        given = ((row >= first) & (row < M))[:, None]
        x = tl.load(
            qkvz_ptr + row[:, None] * SIZES.width + channels[None, :], mask=given, other=0.0
        )
        past = windows + (row - first + (W - 1))[:, None] * C + channels[None, :]
        before = tl.load(past, mask=(row < first)[:, None], other=0.0)
        weight = tl.load(taps_ptr + channels * W + tap).to(tl.float32)
        y += (x.to(tl.float32) + before.to(tl.float32)) * weight[None, :]
    return y * tl.sigmoid(y)


@triton.jit
def _mix_kernel(
    qkvz_ptr, window_ptr, read_ptr, taps_ptr, mixed_ptr, starts_ptr,
    SIZES: tl.constexpr, BLOCK_M: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Convolution, SiLU and L2 norm of a head of q or k, or convolution and SiLU of one of v."""
    Hk: tl.constexpr = SIZES.Hk
    Dk: tl.constexpr = SIZES.Dk
    Dv: tl.constexpr = SIZES.Dv
    C: tl.constexpr = SIZES.C
    head = tl.program_id(1)
    M = tl.load(starts_ptr + SEQUENCES)
    if tl.program_id(0) * BLOCK_M >= M:  # padding
        return
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (tokens < M)[:, None]
    out = mixed_ptr + tokens[:, None] * C
    if SEQUENCES == 1:
        first = 0
        windows = window_ptr + tl.load(read_ptr).to(tl.int64) * ((SIZES.W - 1) * C)
    else:
        number = sequence_number(starts_ptr, tokens, SEQUENCES)
        first = tl.load(starts_ptr + number)
        slots = tl.load(read_ptr + number).to(tl.int64)
        windows = window_ptr + slots[:, None] * ((SIZES.W - 1) * C)
    if head < 2 * Hk:
        key = head * Dk + tl.arange(0, Dk)
        x = _convolved(qkvz_ptr, windows, taps_ptr, tokens, first, M, key, SIZES)
        scale = tl.where(head < Hk, Dk**-0.5, 1.0)
        x *= (tl.rsqrt(tl.sum(x * x, axis=1) + L2_EPS) * scale)[:, None]
        tl.store(out + key[None, :], x, mask=inside)
    else:
        value = 2 * Hk * Dk + (head - 2 * Hk) * Dv + tl.arange(0, Dv)
        v = _convolved(qkvz_ptr, windows, taps_ptr, tokens, first, M, value, SIZES)
        tl.store(out + value[None, :], v, mask=inside)


@triton.jit
def _inverse(A, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A of four blocks a side.

    Blocks on the diagonal row by row, all at once: sums of powers of A would cancel where keys
    repeat. With B those inverted, and N = B @ (A without them): N^4 = 0, so
    (I + N)^-1 @ B = (I - N) @ (I + N^2) @ B.
    """
    COUNT: tl.constexpr = SIZE // BLOCK
    tl.static_assert(COUNT == 4)
    index = tl.arange(0, COUNT)
    diagonal = index[:, None, None, None] == index[None, None, :, None]
    blocks = tl.reshape(A, [COUNT, BLOCK, COUNT, BLOCK])
    own = tl.sum(tl.where(diagonal, blocks, 0.0), axis=2)  # [COUNT, BLOCK, BLOCK]
    row, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    B = tl.where(row == column, 1.0, 0.0) + 0.0 * own
    for i in tl.range(1, BLOCK):
        a = tl.sum(tl.where(row == i, own, 0.0), axis=1)  # row i of each: [COUNT, BLOCK]
        known = tl.sum(a[:, :, None] * B, axis=1)  # rows from i on meet zeros of a
        B -= tl.where(row == i, known[:, None, :], 0.0)
    B = tl.reshape(tl.where(diagonal, B[:, :, None, :], 0.0), [SIZE, SIZE])
    at, across = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    below = tl.where(at // BLOCK > across // BLOCK, A, 0.0)
    N = tl.dot(B, below, input_precision=PRECISION)
    X = tl.where(at == across, 1.0, 0.0) - N
    X += tl.dot(X, tl.dot(N, N, input_precision=PRECISION), input_precision=PRECISION)
    return tl.dot(X, B, input_precision=PRECISION)


@triton.jit
def _chunk_kernel(
    mixed_ptr, ba_ptr, decay_ptr, dt_bias_ptr, inverse_ptr, scores_ptr, steps_ptr, starts_ptr,
    SIZES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, SEQUENCES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """T, D * (q . k^T), and beta, exp(G) and exp(G[-1] - G) of each token of a chunk and head."""
    Hk: tl.constexpr = SIZES.Hk
    Hv: tl.constexpr = SIZES.Hv
    Dk: tl.constexpr = SIZES.Dk
    C: tl.constexpr = SIZES.C
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, end = chunk_of(starts_ptr, chunk, CHUNK, SEQUENCES)
    if first >= end:  # padding
        return
    offs_t = tl.arange(0, CHUNK)
    tokens = (first + offs_t).to(tl.int64)
    inside = tokens < end
    b = tl.load(ba_ptr + tokens * (2 * Hv) + head, mask=inside, other=0.0)
    a = tl.load(ba_ptr + tokens * (2 * Hv) + Hv + head, mask=inside, other=0.0)
    beta, g = gates(b, a, tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head))
    beta = tl.where(inside, beta, 0.0)
    # In FP64: after one strong decay, differences of FP32 sums would have lost their digits.
    wide = tl.where(inside, g, 0.0).to(tl.float64)
    G = tl.cumsum(wide, axis=0)
    part = (head * tl.num_programs(0) + chunk).to(tl.int64) * CHUNK + offs_t
    tl.store(steps_ptr + part * 3, beta)
    tl.store(steps_ptr + part * 3 + 1, tl.exp(G.to(tl.float32)))
    tl.store(steps_ptr + part * 3 + 2, tl.exp((tl.sum(wide, axis=0) - G).to(tl.float32)))

    k_k = tl.zeros([CHUNK, CHUNK], tl.float32)
    q_k = tl.zeros([CHUNK, CHUNK], tl.float32)
    row = mixed_ptr + tokens[:, None] * C + head // (Hv // Hk) * Dk
    for start in tl.range(0, Dk, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)[None, :]
        q = tl.load(row + offs_k, mask=inside[:, None], other=0.0)  # [CHUNK, BLOCK_K]
        k = tl.load(row + Hk * Dk + offs_k, mask=inside[:, None], other=0.0)
        k_k = tl.dot(k, tl.trans(k), k_k, input_precision=PRECISION)
        q_k = tl.dot(q, tl.trans(k), q_k, input_precision=PRECISION)
    square = part[:, None] * CHUNK + offs_t[None, :]
    lower = offs_t[:, None] >= offs_t[None, :]
    gap = (G[:, None] - G[None, :]).to(tl.float32)
    D = tl.exp(tl.where(lower, gap, float("-inf")))  # masked first: above it would overflow
    tl.store(scores_ptr + square, q_k * D)
    A = tl.where(offs_t[:, None] > offs_t[None, :], k_k * D * beta[:, None], 0.0)
    tl.store(inverse_ptr + square, _inverse(A, CHUNK, CHUNK // 4, PRECISION))


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(
    mixed_ptr, inverse_ptr, scores_ptr, steps_ptr, memory_ptr, read_ptr, write_ptr, o_ptr,
    starts_ptr, chunks, SIZES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
    SEQUENCES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S of a value head through all chunks of a sequence, some columns of it, and their o.

    chunks: from one head to the next, those of padding included.
    """
    Hk: tl.constexpr = SIZES.Hk
    Hv: tl.constexpr = SIZES.Hv
    Dk: tl.constexpr = SIZES.Dk
    Dv: tl.constexpr = SIZES.Dv
    C: tl.constexpr = SIZES.C
    head = tl.program_id(0)
    if SEQUENCES == 1:
        number = 0
        M = tl.load(starts_ptr + 1)
    else:
        number = tl.program_id(2)
        begin = tl.load(starts_ptr + number).to(tl.int64)
        M = tl.load(starts_ptr + number + 1) - begin.to(tl.int32)
        if M == 0:  # an empty sequence
            return
        mixed_ptr += begin * C
        o_ptr += begin * (Hv * Dv)
    before = chunks_before(starts_ptr, number, CHUNK, SEQUENCES)
    offs_t = tl.arange(0, CHUNK)
    offs_k = tl.arange(0, Dk)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = memory_ptr + head * (Dk * Dv) + offs_k[:, None] * Dv + offs_v[None, :]
    slot = tl.load(read_ptr + number).to(tl.int64)
    S = tl.load(tile + slot * (Hv * Dk * Dv))  # [Dk, BLOCK_V]
    for chunk in tl.range(0, tl.cdiv(M, CHUNK)):
        tokens = (chunk * CHUNK + offs_t).to(tl.int64)
        inside = (tokens < M)[:, None]
        first = (head * chunks + before + chunk).to(tl.int64) * CHUNK
        part = first + offs_t
        square = part[:, None] * CHUNK + offs_t[None, :]
        beta = tl.load(steps_ptr + part * 3)[:, None]
        fade = tl.load(steps_ptr + part * 3 + 1)[:, None]
        rest = tl.load(steps_ptr + part * 3 + 2)[:, None]
        row = mixed_ptr + tokens[:, None] * C
        keys = row + head // (Hv // Hk) * Dk + offs_k[None, :]
        values = row + 2 * Hk * Dk + head * Dv + offs_v[None, :]

        k = tl.load(keys + Hk * Dk, mask=inside, other=0.0)  # [CHUNK, Dk]
        v = tl.load(values, mask=inside, other=0.0)  # [CHUNK, BLOCK_V]
        new = beta * (v - fade * tl.dot(k, S, input_precision=PRECISION))
        new = tl.dot(tl.load(inverse_ptr + square), new, input_precision=PRECISION)
        q = tl.load(keys, mask=inside, other=0.0)
        o = fade * tl.dot(q, S, input_precision=PRECISION)
        o += tl.dot(tl.load(scores_ptr + square), new, input_precision=PRECISION)
        tl.store(o_ptr + (tokens[:, None] * Hv + head) * Dv + offs_v[None, :], o, mask=inside)
        S *= tl.load(steps_ptr + (first + CHUNK - 1) * 3 + 1)
        k = tl.load(keys + Hk * Dk, mask=inside, other=0.0)  # loaded again: kept, it would spill
        S += tl.dot(tl.trans(k), rest * new, input_precision=PRECISION)
    if SEQUENCES > 1:
        write_ptr += tl.load(starts_ptr + number)  # loaded again: kept, it would spill
    target = tl.load(write_ptr + M - 1).to(tl.int64)
    if target >= 0:
        tl.store(tile + target * (Hv * Dk * Dv), S)


def delta_prefill(
    qkvz: Tensor, ba: Tensor, layer: DeltaLayer, states: LayerStates, step: Step
) -> Tensor:
    """Result of a gated DeltaNet layer for M tokens of prompts; see `Ops.delta_linear`.

    Returns:
        [M, Hv * Dv] in the dtype of qkvz, anything for padding; the slot `write` has for the last
        token of a sequence holds the state after it. That may be the slot which the sequence, and
        no other, is read from.
    """
    M, sizes, B = qkvz.shape[0], sizes_of(layer), len(step.starts) - 1
    Hv, Dv, chunks = sizes.Hv, sizes.Dv, triton.cdiv(M, CHUNK) + B - 1  # no fewer than there are

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=qkvz.device)

    mixed, o = scratch(M, sizes.C), scratch(M, Hv * Dv)
    inverse, scores = scratch(2, Hv, chunks, CHUNK, CHUNK)
    steps = scratch(Hv, chunks, CHUNK, 3)  # beta, exp(G), exp(G[-1] - G)
    run(
        _mix_kernel,
        (triton.cdiv(M, BLOCK_M), 2 * sizes.Hk + Hv),
        *(qkvz, states.window, step.read, layer.conv, mixed, step.starts),
        SIZES=sizes,
        BLOCK_M=BLOCK_M,
        SEQUENCES=B,
        num_warps=4,
        enable_fp_fusion=True,
    )
    launch = scan_launch(B, Dv, card_of(qkvz))
    options = {
        "PRECISION": launch.precision,
        "num_warps": 4,
        "num_stages": launch.stages,
        "enable_fp_fusion": True,
    }
    run(
        _chunk_kernel,
        (chunks, Hv),
        *(mixed, ba, layer.decay, layer.dt_bias, inverse, scores, steps, step.starts),
        SIZES=sizes,
        CHUNK=CHUNK,
        BLOCK_K=min(BLOCK_K, sizes.Dk),
        SEQUENCES=B,
        **options,
    )
    run(
        _scan_kernel,
        (Hv, Dv // launch.columns, B),
        *(mixed, inverse, scores, steps, states.memory, step.read, step.write, o),
        *(step.starts, chunks),
        SIZES=sizes,
        CHUNK=CHUNK,
        BLOCK_V=launch.columns,
        SEQUENCES=B,
        **options,
    )
    return gated_norm(o, qkvz, layer, states, step)
