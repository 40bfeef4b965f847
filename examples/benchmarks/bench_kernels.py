"""Check the kernels on this GPU, then time them: GEMVs alone, prefill, GEMMs.

Run: python examples/benchmarks/bench_kernels.py
Weights are random, in the shapes of Qwen3. GEMVs rotate over more weights than the L2 cache holds,
many launches in one CUDA graph; `tinygemm` is PyTorch's own INT4 kernel on the same shapes.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import torch
from random_engine import GROUP, packed, randn, random_engine
from torch import Tensor

from lowbit.runtime.kernels.linear.gemm import gemm
from lowbit.runtime.kernels.linear.gemv import gemv, gemv_ref
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.kernels.linear.widen import widened_gemm
from lowbit.runtime.state.step_buffers import lone_step

GEMVS = [
    (4, 6144, 4096),
    (4, 4096, 4096),
    (4, 24576, 4096),
    (4, 4096, 12288),
    (4, 151936, 4096),
    (8, 6144, 4096),
    (8, 24576, 4096),
    (8, 151936, 4096),
    (4, 4096, 2048),
    (4, 2048, 2048),
    (4, 12288, 2048),
    (4, 2048, 6144),
    (8, 151936, 2048),
]
ROTATED_BYTES = 400e6  # L2 holds 60 MB
SIZES = ("0.6B", "1.7B", "8B")


def elapsed_us(body: Callable[[], object]) -> float:
    """Time that the GPU takes for what `body` launches, in microseconds."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    body()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def graph_us(body: Callable[[], object], runs: int = 20) -> float:
    """Median time of one replay of `body` captured in a CUDA graph, in microseconds."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = [elapsed_us(graph.replay) for _ in range(runs + 3)]
    return statistics.median(times[3:])


def check_gemv(w: TiledLinear) -> None:
    """Refuse to time a GEMV that is wrong."""
    x = randn(1, w.K)
    part = TiledLinear(w.words[-256:], w.scales[-256:], w.bits, w.group_size, 16 * 256, w.K)
    part = part if w.tiles > 256 else w
    ref = gemv_ref(x, part)
    error = float((gemv(x, w, dtype=torch.float32)[:, -part.N :] - ref).norm() / ref.norm())
    if not error < 1e-6:
        raise SystemExit(f"INT{w.bits} {w.N}x{w.K}: relative error {error:.1e}")


def tinygemm_us(N: int, K: int, copies: int) -> float:
    x = randn(1, K)
    bytes_ = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device="cuda")
    weights = [torch.ops.aten._convert_weight_to_int4pack(bytes_, 8) for _ in range(copies)]
    scales = randn(K // GROUP, N, 2)
    multiply = torch.ops.aten._weight_int4pack_mm
    return graph_us(lambda: [multiply(x, w, GROUP, scales) for w in weights]) / copies


def multiply(x: Tensor, weights: list[TiledLinear], **fused: Any) -> list[Tensor]:
    """The product with each weight, in a launch of its own."""
    return [gemv(x, weight, **fused) for weight in weights]


def bench_gemvs() -> None:
    print(f"{'GEMV':<22}{'us':>8}{'TB/s':>7}{'normed':>9}{'tinygemm us':>13}")
    for bits, N, K in GEMVS:
        size = packed(bits, N, K).size_bytes
        copies = max(2, int(ROTATED_BYTES / size))
        weights = [packed(bits, N, K) for _ in range(copies)]
        check_gemv(weights[0])
        x, norm = randn(1, K), randn(K)
        us = graph_us(partial(multiply, x, weights)) / copies
        normed = graph_us(partial(multiply, x, weights, norm=norm, eps=1e-6)) / copies
        peer = f"{tinygemm_us(N, K, copies):13.1f}" if bits == 4 else ""
        print(f"INT{bits} {N}x{K:<12}{us:8.2f}{size / us / 1e6:7.2f}{normed:9.2f}{peer}")


def bench_prefill() -> None:
    for size in SIZES:
        engine = random_engine(size, 4)
        for M in (16, 128, 512, 2048):
            prompt = torch.randint(engine.decoder.config.vocab_size, (M,), device="cuda")
            step, state = lone_step(M, "cuda"), engine.runner.state
            body = partial(engine.decoder.hidden, prompt, state, step)
            us = graph_us(body, runs=5)
            print(f"{size} INT4, prefill of {M:>4}: {us / 1e3:7.2f} ms = {1e6 * M / us:8.0f} tok/s")
        del engine
        torch.cuda.empty_cache()


def bench_gemms() -> None:
    print(f"{'GEMM 24576x4096':<22}{'ms':>8}{'TFLOP/s':>9}{'widened ms':>12}{'cuBLAS BF16 ms':>16}")
    dense = randn(24576, 4096)
    for bits in (4, 8):
        w = packed(bits, 24576, 4096)
        for M in (4, 16, 64, 256, 1024, 4096):
            x = randn(M, 4096)
            us = graph_us(partial(gemm, x, w))
            wide = graph_us(partial(widened_gemm, x, w))
            peer = graph_us(partial(torch.matmul, x, dense.T))
            flops = 2 * M * w.N * w.K / us / 1e6
            print(
                f"INT{bits} M = {M:<12}{us / 1e3:8.3f}{flops:9.1f}{wide / 1e3:12.3f}"
                f"{peer / 1e3:16.3f}"
            )


@click.command()
def main() -> None:
    """Check the kernels on this GPU, then time them."""
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels needs an NVIDIA GPU")
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    bench_gemvs()
    bench_prefill()
    bench_gemms()


if __name__ == "__main__":
    main()
