"""Speeds that a machine reaches, measured now, and the time of a step that follows from them."""

import time

import torch

from lowbit.formats.layout.packing import packed_words
from lowbit.formats.machine.memory import free_bytes
from lowbit.runtime.backends.cpu import rms_norm
from lowbit.runtime.backends.cpu_linear import linear, prepare
from lowbit.runtime.kernels.launch import tables
from lowbit.runtime.weights.linear import PackedLinear

BANDWIDTH_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
# A CPU's layer takes as long beyond its read as so many norms: 210 tok/s expected for 184 measured
# on AVX2, 250 for 238 on an AMX Xeon (tiny-qwen3, INT4).
NORMS, NORM_SIZE, NORM_ROUNDS = 30, 256, 20
PRODUCT_SIZE, PRODUCT_GROUP, PRODUCT_TOKENS, PRODUCT_ROUNDS = 1024, 128, 512, 5
CPU_SHARE = 0.4  # of the bandwidth, with two cores that others used too; one core reached 0.36
SUMS = 5  # timed together, so that the launch of one is not counted against the memory


def read_bandwidth(device: str, repeats: int = 5) -> float:
    """Bytes per second of the fastest of `repeats` reads of a buffer larger than any cache."""
    size, free = BANDWIDTH_BYTES[device], free_bytes(device)
    if free is not None:
        size = min(size, free // 2)
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats):
        settle(device)
        started = time.perf_counter()
        for _ in range(SUMS):
            buffer.sum()
        settle(device)
        best = min(best, time.perf_counter() - started)
    return SUMS * buffer.nbytes / best


def expected_step_s(
    step_bytes: int, layers: int, layer_s: float, device: str, bandwidth: float
) -> float:
    """Seconds that a plain step of one sequence should take: its read, and more for each layer.

    A CPU reaches a share of the bandwidth.

    Args:
        layer_s: seconds of a layer beyond the read; see `seconds_beside_read`.
        bandwidth: bytes per second that a plain read of memory reaches.
    """
    read = step_bytes / bandwidth
    return (read / CPU_SHARE if device == "cpu" else read) + layers * layer_s


def seconds_beside_read(device: str, mixture: bool) -> float:
    """Seconds of a layer in a decode step beyond the read of its bytes.

    Those of a GPU are an H200's. A CPU spends them in the interpreter and in PyTorch's calls, whose
    time is measured on an RMS norm of one token, now.
    """
    if device != "cpu":
        return tables.seconds_beside_read("experts" if mixture else "dense")
    x, gain = torch.ones(1, NORM_SIZE, dtype=torch.bfloat16), torch.ones(NORM_SIZE)
    best = float("inf")
    with torch.inference_mode():
        for _ in range(NORM_ROUNDS):
            began = time.perf_counter()
            for _ in range(NORMS):
                rms_norm(x, gain, 1e-6)
            best = min(best, time.perf_counter() - began)
    return best


def products_per_s() -> float:
    """Weights times tokens per second of a prompt's linear layers on this CPU, in INT4."""
    N = K = PRODUCT_SIZE
    codes = torch.zeros(N, packed_words(K, 4), dtype=torch.int32)
    scales = torch.ones(N, K // PRODUCT_GROUP, dtype=torch.bfloat16)
    weight = prepare(PackedLinear(codes, scales, 4, PRODUCT_GROUP), torch.bfloat16)
    x = torch.ones(PRODUCT_TOKENS, K, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(PRODUCT_ROUNDS):
        began = time.perf_counter()
        linear(x, weight)
        best = min(best, time.perf_counter() - began)
    return N * K * PRODUCT_TOKENS / best


def settle(device: str) -> None:
    """Wait until a GPU has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
