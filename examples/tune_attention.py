"""Time splits of attention on this GPU beside those that `lowbit.runtime.kernels.launch` takes.

Run: python examples/tune_attention.py
Prints a line a shape: what is taken, then the fastest sizes. What wins is put into the rule by
hand, with the figures in `runtime/kernels/LOG.md`.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
from bench_kernels import graph_us
from random_engine import randn

from lowbit.runtime.cache import new_cache
from lowbit.runtime.kernels import attention_decode
from lowbit.runtime.kernels.launch import AttentionLaunch, attention_launch
from lowbit.runtime.ops import rope_tables

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


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("tune_attention needs an NVIDIA GPU")
    tune_attention()
