"""Time launch sizes on this GPU beside those of the table in `lowbit.runtime.kernels.launch`.

Run: python examples/tune_kernels.py gemv | attention
Prints a line a shape: what the table takes, then the fastest sizes. What wins is put into the table
by hand, with the figures in `runtime/kernels/LOG.md`.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
from bench_kernels import graph_us, packed, randn

from lowbit.runtime.cache import new_cache
from lowbit.runtime.kernels import attention_decode, gemv
from lowbit.runtime.kernels.launch import (
    AttentionLaunch,
    GemvLaunch,
    attention_launch,
    gemv_launch,
)
from lowbit.runtime.kernels.tiles import TiledLinear
from lowbit.runtime.ops import rope_tables

# the linears of Qwen3-0.6B, 1.7B, 4B and 8B: (N, K)
INT4_SHAPES = (
    *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    *((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)),
    *((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)),
    *((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
)
INT8_SHAPES = ((151936, 1024), (151936, 2048), (151936, 4096), (6144, 4096), (4096, 12288))
ROTATED_BYTES = 300e6  # more than the L2 cache, so that weights come from memory
SHOWN = 5
OUT_OF_RESOURCES = (
    triton.runtime.errors.OutOfResources,
    triton.runtime.errors.PTXASError,
    triton.compiler.errors.CompilationError,
)

Sizes = tuple[Any, ...]


def ranked(candidates: list[Sizes], time_us: Callable[[Sizes], float]) -> list[tuple[float, Sizes]]:
    """Candidates by time; those that do not fit the GPU are left out."""
    found = []
    for candidate in candidates:
        try:
            found.append((time_us(candidate), candidate))
        except OUT_OF_RESOURCES as error:
            print(f"  {candidate}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
    return sorted(found, key=lambda pair: pair[0])


def show(title: str, table: Sizes, rows: list[tuple[float, Sizes]]) -> None:
    now = [f"{us:.2f} us" for us, sizes in rows if sizes == table]
    best = "  ".join(f"{us:.2f} {sizes}" for us, sizes in rows[:SHOWN])
    print(f"{title:<24} table {table} {now[0] if now else 'not timed'}; best {best}", flush=True)


def tune_gemv() -> None:
    for bits, (N, K) in [(4, s) for s in INT4_SHAPES] + [(8, s) for s in INT8_SHAPES]:
        size = packed(bits, N, K).size_bytes
        weights = [packed(bits, N, K) for _ in range(max(3, min(100, int(ROTATED_BYTES / size))))]
        tiles, steps = weights[0].tiles, weights[0].steps
        x, norm = randn(1, K), randn(K)
        candidates: list[Sizes] = [
            (rows, depth, warps, early, registers, raw)
            for rows, depth, warps, early, registers, raw in itertools.product(
                (1, 2), (1, 2, 3, 4, 6), (4, 8), (False, True), (None, 128, 168), (False, True)
            )
            if rows * depth <= 8 and depth * warps <= steps and tiles // rows >= 60
        ]

        def time_us(
            sizes: Sizes,
            weights: list[TiledLinear] = weights,
            x: torch.Tensor = x,
            norm: torch.Tensor = norm,
        ) -> float:
            with mock.patch.object(gemv, "gemv_launch", return_value=GemvLaunch(*sizes)):
                body = lambda: [gemv.gemv(x, w, norm=norm, eps=1e-6) for w in weights]  # noqa: E731
                return graph_us(body, runs=5) / len(weights)

        table = gemv_launch(tiles, steps, 1)
        default = (
            table.tiles,
            table.steps,
            table.warps,
            table.early,
            table.registers,
            table.raw,
        )
        show(f"INT{bits} {N}x{K}", default, ranked(candidates, time_us))


def tune_attention() -> None:
    layers, context = 16, 8192
    for heads, kv_heads, dim in ((16, 8, 128), (32, 8, 128), (16, 4, 256)):
        cache = new_cache(layers, kv_heads, dim, context, torch.bfloat16, "cuda")
        cache.k.normal_()
        cache.v.normal_()
        rope, q_norm, k_norm = rope_tables(context, dim, 1e6, "cuda"), randn(dim), randn(dim)
        qkv = randn(1, (heads + 2 * kv_heads) * dim)
        for position in (128, 1024, 8191):
            cache.truncate(position)
            reach = cache.reach_for(position + 1)
            table = attention_launch(kv_heads, heads // kv_heads, reach, dim)

            def time_us(sizes: Sizes, qkv: torch.Tensor = qkv) -> float:
                launch = AttentionLaunch(*sizes)
                with mock.patch.object(attention_decode, "attention_launch", return_value=launch):
                    body = lambda: [  # noqa: E731
                        attention_decode.attention_decode(qkv, q_norm, k_norm, 1e-6, rope, cache, i)  # noqa: B023
                        for i in range(layers)
                    ]
                    return graph_us(body, runs=5) / layers

            blocks = (1,) if dim > 128 else (1, 2)
            candidates: list[Sizes] = list(itertools.product((1, 2, 8, 16, 32, 64), (4, 8), blocks))
            rows = ranked(candidates, time_us)
            show(
                f"{heads}/{kv_heads} heads of {dim} at {position}",
                (table.splits, table.warps, table.blocks),
                rows,
            )


TUNERS = {"gemv": tune_gemv, "attention": tune_attention}

if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("tune_kernels needs an NVIDIA GPU")
    if len(sys.argv) != 2 or sys.argv[1] not in TUNERS:
        raise SystemExit(f"usage: tune_kernels.py {' | '.join(TUNERS)}")
    TUNERS[sys.argv[1]]()
