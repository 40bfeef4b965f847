"""Check the kernels on this GPU, then time them: GEMVs alone, whole decode steps, prefill.

Run: python examples/bench_kernels.py
Weights are random, in the shapes of Qwen3. GEMVs rotate over more weights than the L2 cache holds,
many launches in one CUDA graph; `tinygemm` is PyTorch's own INT4 kernel on the same shapes.
"""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from lowbit.formats.architectures.dense import DenseConfig
from lowbit.runtime import cuda
from lowbit.runtime.cache import KVCache, new_cache
from lowbit.runtime.kernels.gemv import gemv, gemv_ref
from lowbit.runtime.kernels.tiles import TILE, WORDS, GpuLinear, TiledLinear
from lowbit.runtime.kernels.widen import gemm
from lowbit.runtime.models.dense import Dense, Layer
from lowbit.runtime.ops import rope_tables

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
GROUP = 128
ROTATED_BYTES = 400e6  # L2 holds 60 MB
CONTEXT = 8192
MODELS = {
    "Qwen3-0.6B": DenseConfig(151936, 1024, 3072, 28, 16, 8, 128, 1e-6, 1e6, 40960, False),
    "Qwen3-1.7B": DenseConfig(151936, 2048, 6144, 28, 16, 8, 128, 1e-6, 1e6, 40960, False),
    "Qwen3-8B": DenseConfig(151936, 4096, 12288, 36, 32, 8, 128, 1e-6, 1e6, 40960, False),
}


def packed(bits: int, N: int, K: int, paired: bool = False) -> TiledLinear:
    """Random codes, and scales that keep activations near one."""
    shape = (N // TILE, K * bits // (32 * WORDS), 2, 8, 4, 4)
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")
    scales = torch.randn(N // TILE, K // GROUP, 8, 2, device="cuda") / (2 ** (bits - 1) * K**0.5)
    return TiledLinear(words, scales.bfloat16(), bits, GROUP, N, K, paired)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def graph_us(body: Callable[[], object], runs: int = 20) -> float:
    """Median time of one replay of `body` captured in a CUDA graph, in microseconds."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = []
    for _ in range(runs + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
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


def bench_gemvs() -> None:
    print(f"{'GEMV':<22}{'us':>8}{'TB/s':>7}{'normed':>9}{'tinygemm us':>13}")
    for bits, N, K in GEMVS:
        size = packed(bits, N, K).size_bytes
        copies = max(2, int(ROTATED_BYTES / size))
        weights = [packed(bits, N, K) for _ in range(copies)]
        check_gemv(weights[0])
        x, norm = randn(1, K), randn(K)
        us = graph_us(lambda x=x, ws=weights: [gemv(x, w) for w in ws]) / copies
        normed = (
            graph_us(lambda x=x, ws=weights, g=norm: [gemv(x, w, norm=g, eps=1e-6) for w in ws])
            / copies
        )
        peer = f"{tinygemm_us(N, K, copies):13.1f}" if bits == 4 else ""
        print(f"INT{bits} {N}x{K:<12}{us:8.2f}{size / us / 1e6:7.2f}{normed:9.2f}{peer}")


def random_model(config: DenseConfig) -> Dense[GpuLinear]:
    h, inner, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    layers = tuple(
        Layer(
            input_norm=1 + 0.1 * randn(h),
            qkv=packed(4, q + 2 * kv, h),
            q_norm=1 + 0.1 * randn(D),
            k_norm=1 + 0.1 * randn(D),
            o=packed(4, h, q),
            post_norm=1 + 0.1 * randn(h),
            gate_up=packed(4, 2 * inner, h, paired=True),
            down=packed(4, h, inner),
        )
        for _ in range(config.num_hidden_layers)
    )
    return Dense(
        config=config,
        embedding=randn(config.vocab_size, h),
        layers=layers,
        norm=1 + 0.1 * randn(h),
        head=packed(8, config.vocab_size, h),
        rope=rope_tables(CONTEXT, D, config.rope_theta, "cuda"),
        ops=cuda,
    )


def filled_cache(config: DenseConfig) -> KVCache:
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    cache = new_cache(layers, heads, config.head_dim, CONTEXT, torch.bfloat16, "cuda")
    cache.k.normal_()
    cache.v.normal_()
    return cache


def bench_steps() -> None:
    for name, config in MODELS.items():
        model, cache = random_model(config), filled_cache(config)
        linears = [w for a in model.layers for w in (a.qkv, a.o, a.gate_up, a.down)]
        size = model.head.size_bytes + sum(w.size_bytes for w in linears)
        ids = torch.zeros(1, dtype=torch.int64, device="cuda")
        for position in (128, 4096, CONTEXT - 1):
            cache.truncate(position)
            cache.reach = cache.reach_for(position + 1)
            us = graph_us(
                lambda m=model, i=ids, c=cache: i.copy_(m.logits(m.hidden(i, c)).argmax(-1))
            )
            print(
                f"{name}, INT4, head INT8, greedy step at {position:>4}: {us:7.1f} us = "
                f"{1e6 / us:6.1f} tok/s, weights at {size / us / 1e6:.2f} TB/s"
            )
        for M in (16, 128, 512, 2048):
            prompt = torch.randint(config.vocab_size, (M,), device="cuda")
            cache.truncate(0)
            us = graph_us(lambda m=model, p=prompt, c=cache: m.hidden(p, c), runs=5)
            print(f"{name}, prefill of {M:>4}: {us / 1e3:7.2f} ms = {1e6 * M / us:8.0f} tok/s")
        del model, cache
        torch.cuda.empty_cache()


def bench_gemms() -> None:
    print(f"{'GEMM 24576x4096':<22}{'ms':>8}{'TFLOP/s':>9}{'cuBLAS BF16 ms':>16}")
    dense = randn(24576, 4096)
    for bits in (4, 8):
        w = packed(bits, 24576, 4096)
        for M in (4, 16, 64, 256, 1024, 4096):
            x = randn(M, 4096)
            us = graph_us(lambda x=x, w=w: gemm(x, w))
            peer = graph_us(lambda x=x: x @ dense.T)
            flops = 2 * M * w.N * w.K / us / 1e6
            print(f"INT{bits} M = {M:<12}{us / 1e3:8.3f}{flops:9.1f}{peer / 1e3:16.3f}")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels needs an NVIDIA GPU")
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    bench_gemvs()
    bench_steps()
    bench_gemms()
