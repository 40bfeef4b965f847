"""experts_gemm: a prompt's tokens through their experts, those of one expert together.

    act[p] = silu(gate_e @ h[p // slots]) * (up_e @ h[p // slots])          (p in order of experts)
    out[p] = share[p] * down_e @ act[p]                                     (FP32, p by token)
    y[b]   = x[b] + sum_s out[b * slots + s]

Layout  h [M, K] bf16 normed, weights in tiles of all experts (`tiled_experts`); act [P, I] bf16
        and out [P, N] fp32 of P = M * slots pairs, for at most MOST_TOKENS tokens at a time
Plan    a program takes up to ROWS pairs of one expert and some columns. Codes become BF16 weights
        in registers, rounded once, as those of `widen` are, and are multiplied on tensor cores.
        Which block a program has follows from where the experts end, for as many programs as there
        could be blocks. A token's slots are summed in order, with the residual in FP32
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.kernels.device import run
from lowbit.runtime.kernels.experts_launch import GemmLaunch, experts_gemm_launch
from lowbit.runtime.kernels.experts_route import by_expert, experts_route, place_of
from lowbit.runtime.kernels.tiled_experts import TiledExperts

MOST_TOKENS = 1024
BLOCK = 1024  # columns of a sum
LARGEST_BLOCK_K = 64


@triton.jit
def _row_at(rows, TILE_WORDS: tl.constexpr):
    """Offset of a row's first word among those of an expert; rows: 16 * tile + 8 * half + g."""
    return rows // 16 * TILE_WORDS + rows // 8 % 2 * 128 + rows % 8 * 16


@triton.jit
def _weights(
    words_ptr, scales_ptr, rows, k, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weights [ROWS, BLOCK_K] of some rows of an expert, from column k on, in BF16.

    BLOCK_K divides K and G.
    """
    STEP_K: tl.constexpr = 512 // BITS
    STEPS: tl.constexpr = (K + STEP_K - 1) // STEP_K
    EACH: tl.constexpr = 32 // BITS  # codes of a word
    INNER: tl.constexpr = 8 // EACH  # words of a chunk
    word = k // EACH + tl.arange(0, BLOCK_K // EACH)
    chunk = word // INNER
    within = chunk % (STEP_K // 8)
    at = chunk // (STEP_K // 8) * 256 + within % 4 * 4 + within // 4 * INNER + word % INNER
    words = tl.load(words_ptr + _row_at(rows, STEPS * 256)[:, None] + at[None, :])
    code = tl.arange(0, EACH)
    up = 32 - BITS - (code % 2 * (EACH // 2) + code // 2) * BITS  # its place, see `tiles`
    codes = (words[:, :, None] << up[None, None, :]) >> (32 - BITS)
    codes = tl.reshape(codes, (ROWS, BLOCK_K)).to(tl.float32)
    scale_at = (rows // 16 * (K // G) + k // G) * 16 + rows % 8 * 2 + rows // 8 % 2
    scales = tl.load(scales_ptr + scale_at).to(tl.float32)
    return (codes * scales[:, None]).to(tl.bfloat16)


@triton.jit
def _dot(x, w, acc, WIDE: tl.constexpr):
    """Acc + x @ w.T; WIDE: in FP32, for the interpreter, which has no products of BF16."""
    if WIDE:
        acc = tl.dot(x.to(tl.float32), tl.trans(w).to(tl.float32), acc)
    else:
        acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def _experts_gate_up_gemm_kernel(
    h_ptr, order_ptr, ends_ptr, words_ptr, scales_ptr, act_ptr, words_of, scales_of,
    I: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr,  # noqa: E741
    G: tl.constexpr, BITS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """words_of, scales_of: from one expert to the next."""
    expert, first, end = place_of(tl.program_id(1), ends_ptr, EXPERTS, EXPERTS_BLOCK, ROWS)
    if first < end:
        place = first + tl.arange(0, ROWS)
        inside = place < end
        pair = tl.load(order_ptr + place, mask=inside, other=0)
        offs_k = tl.arange(0, BLOCK_K)
        x_at = h_ptr + (pair // SLOTS * K)[:, None] + offs_k[None, :]
        n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        own = tl.minimum(n, I - 1)
        gate_rows = own // 8 * 16 + own % 8
        words_ptr += expert.to(tl.int64) * words_of
        scales_ptr += expert.to(tl.int64) * scales_of
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = tl.load(x_at + k, mask=inside[:, None], other=0.0)
            w = _weights(words_ptr, scales_ptr, gate_rows, k, K, G, BITS, COLUMNS, BLOCK_K)
            gate = _dot(x, w, gate, WIDE)
            w = _weights(words_ptr, scales_ptr, gate_rows + 8, k, K, G, BITS, COLUMNS, BLOCK_K)
            up = _dot(x, w, up, WIDE)
        act = gate * tl.sigmoid(gate) * up
        at = act_ptr + place.to(tl.int64)[:, None] * I + n[None, :]
        tl.store(at, act.to(act_ptr.dtype.element_ty), mask=inside[:, None] & (n < I)[None, :])


@triton.jit
def _experts_down_gemm_kernel(
    act_ptr, order_ptr, ends_ptr, shares_ptr, words_ptr, scales_ptr, out_ptr, words_of, scales_of,
    N: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    expert, first, end = place_of(tl.program_id(1), ends_ptr, EXPERTS, EXPERTS_BLOCK, ROWS)
    if first < end:
        place = first + tl.arange(0, ROWS)
        inside = place < end
        pair = tl.load(order_ptr + place, mask=inside, other=0)
        share = tl.load(shares_ptr + pair, mask=inside, other=0.0)
        offs_k = tl.arange(0, BLOCK_K)
        x_at = act_ptr + place.to(tl.int64)[:, None] * K + offs_k[None, :]
        n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        rows = tl.minimum(n, N - 1)
        words_ptr += expert.to(tl.int64) * words_of
        scales_ptr += expert.to(tl.int64) * scales_of
        y = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = tl.load(x_at + k, mask=inside[:, None], other=0.0)
            w = _weights(words_ptr, scales_ptr, rows, k, K, G, BITS, COLUMNS, BLOCK_K)
            y = _dot(x, w, y, WIDE)
        at = out_ptr + (pair * N)[:, None] + n[None, :]
        tl.store(at, share[:, None] * y, mask=inside[:, None] & (n < N)[None, :])


@triton.jit
def _experts_sum_kernel(x_ptr, out_ptr, y_ptr, N, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for slot in range(SLOTS):
        y += tl.load(out_ptr + (token * SLOTS + slot) * N + n, mask=n < N, other=0.0)
    y += tl.load(x_ptr + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


def experts_gemm(
    h: Tensor,
    scores: Tensor,
    gate_up: TiledExperts,
    down: TiledExperts,
    chosen: int,
    shared: bool,
    x: Tensor,
) -> Tensor:
    """Add to every token what its experts make of it, for many tokens.

    Args:
        h: [M, K] bfloat16, the normed tokens.
        scores: [M, experts] float32, of the router.
        gate_up: [2 * I, K] of every expert, paired.
        down: [K, I] of every expert.
        chosen: experts of a token, beside the shared one.
        shared: the last expert is every token's.
        x: [M, K], the residual.

    Returns:
        [M, K] in x's dtype.
    """
    y = torch.empty_like(x)
    for first in range(0, x.shape[0], MOST_TOKENS):
        part = slice(first, first + MOST_TOKENS)
        routes = experts_route(scores[part], chosen, shared)
        order, ends = by_expert(routes.numbers, len(gate_up))
        launch = experts_gemm_launch(len(order), len(gate_up))
        act = _gate_up_gemm(h[part], order, ends, gate_up, chosen + shared, launch)
        out = _down_gemm(act, order, ends, routes.shares, down, launch)
        _sum(x[part], out, y[part])
    return y


def _gate_up_gemm(
    h: Tensor, order: Tensor, ends: Tensor, w: TiledExperts, slots: int, launch: GemmLaunch
) -> Tensor:
    """The act of every pair in the order of experts: [P, I]."""
    pairs, inner = len(order), w.N // 2
    act = torch.empty((pairs, inner), dtype=h.dtype, device=h.device)
    run(
        _experts_gate_up_gemm_kernel,
        (triton.cdiv(inner, launch.gate_columns), _blocks(pairs, len(w), launch.rows)),
        h,
        order,
        ends,
        w.words,
        w.scales,
        act,
        w.words[0].numel(),
        w.scales[0].numel(),
        I=inner,
        EXPERTS=len(w),
        SLOTS=slots,
        K=w.K,
        G=w.group_size,
        BITS=w.bits,
        EXPERTS_BLOCK=triton.next_power_of_2(len(w)),
        ROWS=launch.rows,
        COLUMNS=launch.gate_columns,
        BLOCK_K=_block_k(w),
        WIDE=act.device.type == "cpu",
        num_warps=launch.warps,
        num_stages=launch.stages,
        enable_fp_fusion=True,
    )
    return act


def _down_gemm(
    act: Tensor, order: Tensor, ends: Tensor, shares: Tensor, w: TiledExperts, launch: GemmLaunch
) -> Tensor:
    """What every pair adds to its token: [P, N] float32, by token and slot."""
    out = torch.empty((len(order), w.N), dtype=torch.float32, device=act.device)
    run(
        _experts_down_gemm_kernel,
        (triton.cdiv(w.N, launch.down_columns), _blocks(len(order), len(w), launch.rows)),
        act,
        order,
        ends,
        shares,
        w.words,
        w.scales,
        out,
        w.words[0].numel(),
        w.scales[0].numel(),
        N=w.N,
        EXPERTS=len(w),
        K=w.K,
        G=w.group_size,
        BITS=w.bits,
        EXPERTS_BLOCK=triton.next_power_of_2(len(w)),
        ROWS=launch.rows,
        COLUMNS=launch.down_columns,
        BLOCK_K=_block_k(w),
        WIDE=act.device.type == "cpu",
        num_warps=launch.warps,
        num_stages=launch.stages,
        enable_fp_fusion=True,
    )
    return out


def _sum(x: Tensor, out: Tensor, y: Tensor) -> None:
    """Fill y with the residual and what a token's slots add, in order."""
    M, N = x.shape
    run(
        _experts_sum_kernel,
        (M, triton.cdiv(N, BLOCK)),
        x,
        out,
        y,
        N,
        SLOTS=len(out) // M,
        BLOCK=BLOCK,
        enable_fp_fusion=True,
    )


def _blocks(pairs: int, experts: int, rows: int) -> int:
    """At least as many blocks as any choice of experts fills, each with pairs of one expert."""
    return min(pairs, pairs // rows + experts)


def _block_k(w: TiledExperts) -> int:
    """Columns multiplied at a time: they divide a row and share a scale."""
    return min(LARGEST_BLOCK_K, w.K & -w.K, w.group_size & -w.group_size)
