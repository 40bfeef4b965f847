"""Time what steps of 17 to 64 sequences are made of beside packed linears, on this GPU.

Run: python examples/benchmarks/bench_company.py [attention|dense]
Attention for each way to launch it: `one order` gives a token the bits that it has alone, `no
splits` does not and is what such steps took before. Dense rows in every share of a program, beside
cuBLAS. All of a line run in one process, over more keys or weights than the L2 cache holds, in one
CUDA graph; kernels compile one by one, some seconds each. What wins is put into `kernels.launch` by
hand, with the figures in `runtime/kernels/LOG.md`.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import click
import torch
from bench_cache import next_tokens
from bench_kernels import ROTATED_BYTES, graph_us
from torch import Tensor

from lowbit.formats.kv_cache import BF16_CACHE
from lowbit.runtime.kernels.attention import decode
from lowbit.runtime.kernels.launch.attention import AttentionLaunch, attention_launch
from lowbit.runtime.kernels.launch.linear import DenseLaunch
from lowbit.runtime.kernels.linear import dense
from lowbit.runtime.kernels.rows import rms_norm
from lowbit.runtime.state.pages import PAGE, new_pages
from lowbit.runtime.state.rope import rope_tables

PARTS = ("attention", "dense")
EPS = 1e-6
CONTEXT = 4096
# query heads, kv heads, size, rotated, gated
HEADS = {
    "8B": (32, 8, 128, 128, False),
    "1.7B": (16, 8, 128, 128, False),
    "3.5-2B": (8, 2, 256, 64, True),
}
LENGTHS = (200, 600, 1000, 4000)
TOKENS = (24, 32, 48, 64)
NO_SPLITS = 1024  # keys up to which steps of more than 16 tokens were not split
DENSE = ((64, 4096), (256, 2048), (151936, 1024), (151936, 4096))
DENSE_LAUNCHES = tuple(DenseLaunch(*each) for each in ((16, 1), (32, 1), (32, 2), (64, 1)))
MOST_COPIES = 24


def ways(
    kv: int, shared: int, D: int, reach: int, tokens: int
) -> Iterator[tuple[str, AttentionLaunch]]:
    """Launches by name; those of the rule first."""
    rule = attention_launch(kv, shared, D, reach, tokens)
    yield "the rule's", rule
    if rule.splits == 1:
        return
    if reach <= NO_SPLITS:
        keys = replace(rule.keys, whole=NO_SPLITS)
        short = attention_launch(kv, shared, D, rule.keys.whole, tokens)
        yield "no splits", replace(short, keys=keys, ahead=0)
    apart = attention_launch(kv, shared, D, reach, 1)
    yield "one order, splits", replace(apart, registers=None)
    if D <= 128:
        yield "one order, splits, 168 registers", replace(apart, registers=168)
    joined = attention_launch(kv, shared, D, reach, 1 << 10)
    for parts in (1, 2) if joined.joined else ():
        yield f"one order, joined, {parts} parts", replace(joined, parts=parts)


def time_attention(name: str) -> None:
    Hq, Hkv, D, R, gated = HEADS[name]
    rope = rope_tables(CONTEXT, R, 1e6, "cuda")
    norms = torch.ones(2, D, dtype=torch.float32 if gated else torch.bfloat16, device="cuda")
    width = (Hq * (2 if gated else 1) + 2 * Hkv) * D
    for length in LENGTHS:
        needed = length // PAGE + 1
        layer = max(TOKENS) * needed * PAGE * Hkv * D * 4
        copies = min(MOST_COPIES, int(ROTATED_BYTES / layer * max(TOKENS) / min(TOKENS)) + 1)
        pages = new_pages(copies, max(TOKENS) * needed + 1, Hkv, D, BF16_CACHE, "cuda")
        pages.k.normal_()
        pages.v.normal_()
        ids = 1 + torch.randperm(max(TOKENS) * needed, device="cuda", dtype=torch.int32)
        tables = torch.zeros(max(TOKENS), CONTEXT // PAGE, dtype=torch.int32, device="cuda")
        tables[:, :needed] = ids.view(max(TOKENS), needed)
        for tokens in TOKENS:
            qkv = torch.randn(tokens, width, device="cuda").bfloat16()
            step = next_tokens(length, tokens, tables)
            for way, launch in ways(Hkv, Hq // Hkv, D, step.max_kv_len, tokens):
                given = qkv, *norms, EPS, rope, pages, step
                with mock.patch.object(decode, "attention_launch", return_value=launch):
                    us = graph_us(partial(attend, given, copies, gated), 10) / copies
                print(f"{name:7} {length:5} keys {tokens:3} tokens {us:8.1f} us  {way}", flush=True)


def attend(given: tuple[Any, ...], layers: int, gated: bool) -> None:
    """Attention of every layer."""
    for layer in range(layers):
        decode.attention_decode(*given, layer, gated)  # type: ignore[call-arg]


def time_dense(N: int, K: int) -> None:
    copies = min(MOST_COPIES, int(ROTATED_BYTES / (2 * N * K)) + 1)
    weights = [torch.randn(N, K, device="cuda").bfloat16() for _ in range(copies)]
    norm = torch.ones(K, device="cuda")
    for tokens in (16, *TOKENS):
        x = torch.randn(tokens, K, device="cuda").bfloat16()

        def normed(x: Tensor = x) -> None:
            for w in weights:
                dense.dense_gemv(x, w, norm=norm, eps=EPS)

        def by_cublas(x: Tensor = x) -> None:
            for w in weights:
                dense.dense_gemm(rms_norm(x, norm, EPS), w, None, torch.bfloat16)

        times = {"cuBLAS": graph_us(by_cublas, 10), "the rule's": graph_us(normed, 10)}
        for launch in DENSE_LAUNCHES:
            with mock.patch.object(dense, "dense_launch", return_value=launch):
                times[f"{launch.tokens} x {16 * launch.tiles}"] = graph_us(normed, 10)
        found = ", ".join(f"{way} {us / copies:.1f}" for way, us in times.items())
        print(f"{N:6} x {K:4} dense rows {tokens:3} tokens, us: {found}", flush=True)


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
def main(parts: tuple[str, ...]) -> None:
    """Time PARTS of a step of 17 to 64 sequences, by default both."""
    if not torch.cuda.is_available():
        raise SystemExit("bench_company needs an NVIDIA GPU")
    wanted = parts or PARTS
    if "attention" in wanted:
        for name in HEADS:
            time_attention(name)
    if "dense" in wanted:
        for size in DENSE:
            time_dense(*size)


if __name__ == "__main__":
    main()
