"""Speed of this machine's matrix products, measured in a twentieth of a second."""

import time
from collections.abc import Callable

import torch

from lowbit.convert.original.precision import tensor_cores
from lowbit.convert.original.threads import alone_on_threads

SECONDS = 0.05
TOKENS = {"cpu": 256, "cuda": 8192}  # rows of the left factor
MOST_COLUMNS = {"cpu": 2048, "cuda": 8192}  # of either side of the weight: creation takes time, too


def matmul_rate(device: torch.device, N: int, K: int) -> float:
    """Floating-point operations a second of products with a weight of a layer's shape.

    On a CPU every thread multiplies by itself, as calibration does.

    Args:
        device: where to compute.
        N: rows of the weight.
        K: columns of the weight.

    Returns:
        two operations for each multiplication and addition.
    """
    kind = device.type
    N, K = min(N, MOST_COLUMNS[kind]), min(K, MOST_COLUMNS[kind])
    x = torch.full((TOKENS[kind], K), 0.5, device=device)
    weight = torch.full((N, K), 0.5, device=device)
    flops = 2 * TOKENS[kind] * N * K

    def multiply() -> None:
        _ = x @ weight.T
        if kind == "cuda":
            torch.cuda.synchronize(device)

    with alone_on_threads(device) as pool, tensor_cores(device):
        multiply()  # the first call loads libraries
        if pool is None:
            return flops * calls_a_second(multiply)
        threads = torch.get_num_threads()
        found = [pool.submit(calls_a_second, multiply) for _ in range(threads)]
        return flops * sum(future.result() for future in found)


def calls_a_second(
    call: Callable[[], None],
    seconds: float = SECONDS,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Calls that are made within some seconds, at least one, over the time that they take."""
    start, count = now(), 0
    while True:
        call()
        count += 1
        taken = now() - start
        if taken >= seconds:
            return count / taken
