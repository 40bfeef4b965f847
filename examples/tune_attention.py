"""Time splits of attention on this GPU beside those that `lowbit.runtime.kernels.launch` takes.

Run: python examples/tune_attention.py
Prints for each shape what is taken, then the fastest. What wins is put into the rule by hand, with
the figures in `runtime/kernels/LOG.md`; between GEMVs it may be another (`early`).
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch
import triton
from bench_kernels import graph_us
from random_engine import randn

from lowbit.runtime.cache import new_cache
from lowbit.runtime.kernels import attention_decode
from lowbit.runtime.kernels.launch import KEYS_OF_ONE, PART, AttentionLaunch, attention_launch
from lowbit.runtime.ops import rope_tables

SHOWN = 5
LAYERS = 16
CONTEXT = 32768
HEADS = ((16, 8, 128), (32, 8, 128), (8, 2, 256), (16, 4, 256))  # queries, keys, size
POSITIONS = (100, 170, 1000, 8000, 32000)
OUT_OF_RESOURCES = (
    triton.runtime.errors.OutOfResources,
    triton.runtime.errors.PTXASError,
    triton.compiler.errors.CompilationError,
)


def candidates(reach: int, head_dim: int) -> list[AttentionLaunch]:
    """All keys by programs that share the columns, or keys that are split."""
    found = []
    for warps, blocks in itertools.product((4, 8), (1, 2)):
        for splits in (1, 4, 8, 16, 32, 64, 128):
            soon = AttentionLaunch(splits, warps, blocks)
            found += [soon, replace(soon, late=True)]
        for parts in (1, 2, 4):
            if reach <= KEYS_OF_ONE and parts * PART <= head_dim:
                whole = AttentionLaunch(1, warps, blocks, parts, reach <= 16 * blocks * warps)
                found += [whole, replace(whole, early=True)]
    return found


def ranked(
    launches: list[AttentionLaunch], time_us: Callable[[AttentionLaunch], float]
) -> list[tuple[float, AttentionLaunch]]:
    """Launches by time; those that do not fit the GPU are left out."""
    found = []
    for launch in launches:
        try:
            found.append((time_us(launch), launch))
        except OUT_OF_RESOURCES as error:
            print(f"  {launch}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
    return sorted(found, key=lambda pair: pair[0])


def tune_attention() -> None:
    for heads, kv_heads, dim in HEADS:
        cache = new_cache(LAYERS, kv_heads, dim, CONTEXT, torch.bfloat16, "cuda")
        cache.k.normal_()
        cache.v.normal_()
        rope, q_norm, k_norm = rope_tables(CONTEXT, dim, 1e6, "cuda"), randn(dim), randn(dim)
        qkv = randn(1, (heads + 2 * kv_heads) * dim)
        for position in POSITIONS:
            cache.truncate(position)
            reach = cache.reach = cache.reach_for(position + 1)
            table = attention_launch(kv_heads, heads // kv_heads, reach, dim)

            def time_us(launch: AttentionLaunch, qkv: torch.Tensor = qkv) -> float:
                with mock.patch.object(attention_decode, "attention_launch", return_value=launch):
                    body = lambda: [  # noqa: E731
                        attention_decode.attention_decode(qkv, q_norm, k_norm, 1e-6, rope, cache, i)  # noqa: B023
                        for i in range(LAYERS)
                    ]
                    return graph_us(body, runs=5) / LAYERS

            rows = ranked(list(dict.fromkeys([table, *candidates(reach, dim)])), time_us)
            print(f"{heads}/{kv_heads} heads of {dim} at {position}:")
            now = next((us for us, launch in rows if launch == table), float("nan"))
            print(f"  {now:8.2f} us {table}, the rule's")
            for us, launch in rows[:SHOWN]:
                print(f"  {us:8.2f} us {launch}", flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("tune_attention needs an NVIDIA GPU")
    tune_attention()
