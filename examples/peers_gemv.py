"""One kernel multiplies one vector by matrices of Qwen3-8B; bench_peers.py runs this for each.

python examples/peers_gemv.py tinygemm
"""

import json
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))
BITS = {"lowbit-int4": 4, "lowbit-int8": 8, "tinygemm": 4, "gemlite": 4, "cublas": 16}
GROUP = 128


def main() -> None:
    """Print microseconds and bytes by shape as one line of JSON."""
    [kernel] = sys.argv[1:]
    bits, l2 = BITS[kernel], torch.cuda.get_device_properties(0).L2_cache_size
    us, sizes = {}, {}
    for N, K in SHAPES:
        size = N * K * bits // 8 + (2 * N * K // GROUP if bits < 16 else 0)
        copies = max(2, -(-4 * l2 // size))
        if kernel.startswith("lowbit"):
            us[f"{N}x{K}"] = lowbit_gemv(bits, N, K, copies)
        else:
            us[f"{N}x{K}"] = peer_gemv(kernel, N, K, copies)
        sizes[f"{N}x{K}"] = size
        torch.cuda.empty_cache()
    print(json.dumps({"us": us, "bytes": sizes}))


def lowbit_gemv(bits: int, N: int, K: int, copies: int) -> float:
    """Microseconds of one multiplication by lowbit's kernel."""
    from lowbit.runtime.kernels.gemv import gemv
    from lowbit.runtime.kernels.tiles import tiled
    from lowbit.runtime.linear import PackedLinear

    x, weights = randn(1, K), []
    for _ in range(copies):
        shape = (N, K * bits // 32)
        words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")
        weights.append(tiled(PackedLinear(words, randn(N, K // GROUP), bits, GROUP)))
    return graph_us(lambda: [gemv(x, weight) for weight in weights]) / copies


def peer_gemv(kernel: str, N: int, K: int, copies: int) -> float:
    """Microseconds of one multiplication by a peer's kernel."""
    x = randn(1, K)
    if kernel == "cublas":
        dense = [randn(N, K) for _ in range(copies)]
        return graph_us(lambda: [nn.functional.linear(x, weight) for weight in dense]) / copies
    if kernel == "gemlite":
        from peers_decode import gemlite_int4

        layers = [gemlite_int4(randn(N, K)) for _ in range(copies)]
        return graph_us(lambda: [layer(x) for layer in layers]) / copies
    packed = []
    for _ in range(copies):
        pairs = torch.randint(256, (N, K // 2), dtype=torch.uint8, device="cuda")
        codes = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        packed.append((codes, randn(K // GROUP, N, 2)))  # scales and zeros
    multiply = torch.ops.aten._weight_int4pack_mm
    return graph_us(lambda: [multiply(x, w, GROUP, scales) for w, scales in packed]) / copies


def randn(*shape: int) -> Tensor:
    """Random BF16 on the GPU."""
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def graph_us(body: Callable[[], object], runs: int = 20) -> float:
    """Median time of one replay of `body` captured in a CUDA graph, in microseconds."""
    body()  # kernels are compiled and tuned here
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
    return float(statistics.median(times[3:]))


if __name__ == "__main__":
    main()
