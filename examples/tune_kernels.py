"""Time launch sizes on this GPU beside those of the table in `lowbit.runtime.kernels.launch`.

Run: python examples/tune_kernels.py gemv | attention | gemm
Prints a line a shape: what the table takes, then the fastest sizes. What wins is put into the table
by hand, with the figures in the change.
"""

import itertools
import sys
from collections.abc import Callable
from unittest import mock

import torch
import triton
from bench_kernels import graph_us, packed, randn

from lowbit.runtime.cache import new_cache
from lowbit.runtime.kernels import attention_decode, gemm, gemv
from lowbit.runtime.kernels.launch import (
    AttentionLaunch,
    GemmLaunch,
    GemvLaunch,
    attention_launch,
    gemm_launch,
    gemv_launch,
)
from lowbit.runtime.ops import rope_tables

# the linears of Qwen3-0.6B, 1.7B and 8B: (N, K)
INT4_SHAPES = (
    *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    *((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)),
    *((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
)
INT8_SHAPES = ((151936, 1024), (151936, 2048), (151936, 4096), (6144, 4096), (4096, 12288))
ROTATED_BYTES = 300e6  # more than the L2 cache, so that weights come from memory
SHOWN = 5
OUT_OF_RESOURCES = (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError)


def ranked(
    candidates: list[tuple[int, ...]], time_us: Callable[[tuple[int, ...]], float]
) -> list[tuple[float, tuple[int, ...]]]:
    """Candidates by time; those that do not fit the GPU are left out."""
    found = []
    for candidate in candidates:
        try:
            found.append((time_us(candidate), candidate))
        except OUT_OF_RESOURCES as error:
            print(f"  {candidate}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
    return sorted(found)


def show(title: str, table: tuple[int, ...], rows: list[tuple[float, tuple[int, ...]]]) -> None:
    now = [f"{us:.2f} us" for us, sizes in rows if sizes == table]
    best = "  ".join(f"{us:.2f} {sizes}" for us, sizes in rows[:SHOWN])
    print(f"{title:<24} table {table} {now[0] if now else 'not timed'}; best {best}", flush=True)


def tune_gemv() -> None:
    for bits, (N, K) in [(4, s) for s in INT4_SHAPES] + [(8, s) for s in INT8_SHAPES]:
        quads = K * bits // 128
        copies = max(2, min(200, int(ROTATED_BYTES / packed(bits, N, K).size_bytes)))
        weights = [packed(bits, N, K) for _ in range(copies)]
        x, norm = randn(1, K), randn(K)
        candidates = [
            (rows, depth, max(1, depth // 32))
            for rows, depth in itertools.product((2, 4, 8, 16), (32, 64, 128, 256))
            if depth < 2 * quads and N // rows >= 100
        ]

        def time_us(
            sizes: tuple[int, ...],
            weights: list[gemv.PackedLinear] = weights,
            x: torch.Tensor = x,
            norm: torch.Tensor = norm,
        ) -> float:
            with mock.patch.object(gemv, "gemv_launch", return_value=GemvLaunch(*sizes)):
                body = lambda: [gemv.gemv(x, w, norm=norm, eps=1e-6) for w in weights]  # noqa: E731
                return graph_us(body, runs=5) / len(weights)

        table = gemv_launch(bits, N, K)
        default = (table.block_n, table.block_q, table.num_warps)
        show(f"INT{bits} {N}x{K}", default, ranked(candidates, time_us))


def tune_attention() -> None:
    layers, kv_heads, dim, context = 16, 8, 128, 8192
    cache = new_cache(layers, kv_heads, dim, context, torch.bfloat16, "cuda")
    cache.k.normal_()
    cache.v.normal_()
    rope, q_norm, k_norm = rope_tables(context, dim, 1e6, "cuda"), randn(dim), randn(dim)
    table = attention_launch(kv_heads, context)
    for heads, position in itertools.product((16, 32), (128, 1024, 8191)):
        qkv = randn(1, (heads + 2 * kv_heads) * dim)
        cache.truncate(position)

        def time_us(sizes: tuple[int, ...], qkv: torch.Tensor = qkv) -> float:
            launch = AttentionLaunch(*sizes)
            with mock.patch.object(attention_decode, "attention_launch", return_value=launch):
                body = lambda: [  # noqa: E731
                    attention_decode.attention_decode(qkv, q_norm, k_norm, 1e-6, rope, cache, i)
                    for i in range(layers)
                ]
                return graph_us(body, runs=5) / layers

        candidates = list(itertools.product((8, 16, 32, 64), (16, 32, 64, 128)))
        rows = ranked(candidates, time_us)
        show(f"{heads} heads at {position}", (table.splits, table.block_t), rows)


def tune_gemm() -> None:
    w = packed(4, 24576, 4096)
    for M in (8, 64, 512, 2048):
        x = randn(M, w.K)
        candidates = [
            (rows, columns, depth, warps, stages)
            for rows, columns, depth, (warps, stages) in itertools.product(
                (16, 64, 128, 256), (32, 64, 128), (64, 128), ((4, 3), (8, 3), (4, 4))
            )
            if rows <= max(16, 2 * M) and rows * columns <= 128 * 256
        ]

        def time_us(sizes: tuple[int, ...], x: torch.Tensor = x) -> float:
            with mock.patch.object(gemm, "gemm_launch", return_value=GemmLaunch(*sizes)):
                return graph_us(lambda: gemm.gemm(x, w), runs=5)

        tile = gemm_launch(M, w.group_size)
        table = (tile.block_m, tile.block_n, tile.block_k, tile.num_warps, tile.num_stages)
        show(f"GEMM M = {M}, 24576x4096", table, ranked(candidates, time_us))


TUNERS = {"gemv": tune_gemv, "attention": tune_attention, "gemm": tune_gemm}

if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("tune_kernels needs an NVIDIA GPU")
    if len(sys.argv) != 2 or sys.argv[1] not in TUNERS:
        raise SystemExit(f"usage: tune_kernels.py {' | '.join(TUNERS)}")
    TUNERS[sys.argv[1]]()
