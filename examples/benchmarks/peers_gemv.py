"""One kernel multiplies one vector by matrices of Qwen3-8B; bench_peers.py runs this for each.

python examples/benchmarks/peers_gemv.py tinygemm
"""

import json

import click
import torch
from bench_kernels import graph_us, tinygemm_us
from random_engine import GROUP, packed, randn
from torch import nn

from lowbit.runtime.kernels.linear.gemv import gemv

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))
BITS = {"lowbit-int4": 4, "lowbit-int8": 8, "tinygemm": 4, "gemlite": 4, "cublas": 16}


@click.command()
@click.argument("kernel", type=click.Choice(list(BITS)))
def main(kernel: str) -> None:
    """Print microseconds and bytes by shape as one line of JSON."""
    if not torch.cuda.is_available():
        raise click.ClickException("peers_gemv needs an NVIDIA GPU")
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
    x, weights = randn(1, K), [packed(bits, N, K) for _ in range(copies)]
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
    return tinygemm_us(N, K, copies)


if __name__ == "__main__":
    main()
