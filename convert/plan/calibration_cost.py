"""Work and memory of a calibration, from the shapes of a model alone.

Operations, two for each multiplication and addition, with T tokens and W weights in the linears of
the decoder's layers:

    passes      2 W T PASSES        layers passed through, originals and quantized ones; of experts
                                    W counts those that a token is routed to
    moments     4 K^2 T             gptq: E[x x^T] and E[x~ x^T] of every input of K values
    solve       SOLVE N K^2         gptq: factor, codes, scales and sweeps of a linear [N, K]
    autoround   6 W B STEPS         forward and backward, STEPS batches of B tokens a layer

They run at SHARE of the rate of plain matrix products; the rest is attention, norms, columns of
codes chosen one by one, and reading weights.

Memory is that of the largest layer, the next one, and the largest input; of the hidden states of
all windows, which are on a GPU where they take a third of its free memory at most; and a quarter
more for what the allocator keeps.
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from lowbit.convert.original.device import tensor_cores
from lowbit.convert.original.layer import BATCH_TOKENS
from lowbit.convert.original.threads import alone_on_threads
from lowbit.convert.plan.method import Method
from lowbit.formats.architectures import read_config, tensor_table
from lowbit.formats.errors import ResourceError
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.machine.memory import free_bytes

PASSES = {"rtn": 1.0, "weighted": 1.0, "gptq": 4.3}  # of the layers, by how codes are chosen
MOMENTS = 4  # K^2 operations a token
SOLVE = 21  # N K^2 operations
STEP_TOKENS = 2048  # B, of a step of autoround
AUTOROUND_STEPS = 200
STATES_SHARE = 3  # one part of so many of a GPU's free memory may be hidden states
SHARE = {"cpu": 0.6, "cuda": 0.6}  # of the rate of plain products

WEIGHT_BYTES = 18  # original, its copy, the new one, the next layer's, two sets of codes
AUTOROUND_BYTES = 16  # a weight more: positions, gradients, their squares
SQUARES = 10  # K x K matrices in FP32: sums, also of windows held out, damped, ordered, factors
SOLVE_BYTES = 32  # for each of N x K: target, rest, steps, codes, slope and copies
NORMAL_ELEMENTS = 1 << 26  # of the normal equations of the scales of some rows
NORMAL_BYTES = 12  # for each: equations, factors and a copy
SMALL_GROUP = 64  # weights that share a scale in those equations
PRODUCTS_BYTES = 4 << 30  # of batches' moments that threads hold at a time
BASE_BYTES = 700 << 20  # interpreter, torch and transformers
LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")
RATE_SECONDS = 0.05  # that a measurement of the rate takes
RATE_TOKENS = {"cpu": 256, "cuda": 8192}  # rows of the left factor
RATE_COLUMNS = {"cpu": 2048, "cuda": 8192}  # either side of it at most: creation takes time, too


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of the calibration text: how many, and tokens of each."""

    count: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.count * self.length


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak memory in bytes."""

    ram: int  # of the machine, should the hidden states be there
    gpu: int  # of the GPU, should the hidden states be there; 0 on a CPU
    window: int  # part of both that each window of the text takes


@dataclass(frozen=True)
class Shapes:
    """The matrices that a calibration passes through."""

    layers: tuple[tuple[tuple[int, int], ...], ...]  # of each decoder layer, every matrix [N, K]
    # Of each decoder layer, K of every input that a quantized linear reads; of experts as often as
    # a token is routed to one.
    inputs: tuple[tuple[int, ...], ...]
    solved: tuple[tuple[int, int], ...]  # [N, K] of each quantized linear, the head included
    vocabulary: int  # rows of the head
    hidden: int  # its columns
    active: int  # weights of the matrices of all layers that a token passes through
    routed: bool  # there are experts, of which a token passes through some

    @cached_property
    def weights(self) -> int:
        """Weights of the matrices of all layers."""
        return sum(math.prod(shape) for layer in self.layers for shape in layer)

    @cached_property
    def largest(self) -> tuple[int, int]:
        """The largest matrix of a layer."""
        return max((shape for layer in self.layers for shape in layer), key=math.prod)


def shapes_of(
    config: Mapping[str, Any],
    schemes: Mapping[str, Scheme | None],
    names: Collection[str] = (),
) -> Shapes:
    """The matrices of a model.

    Args:
        names: of its tensors; see `tensor_table`.
    """
    table, experts = tensor_table(config, names), read_config(config).experts
    passed = Fraction(0)
    layers: dict[str, list[tuple[int, int]]] = defaultdict(list)
    inputs: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    solved = []
    for spec in table:
        match = LAYER.match(spec.name)
        if len(spec.shape) != 2 or (match is None and spec.role != "head"):
            continue
        N, K = spec.shape
        scheme = schemes.get(spec.module)
        if scheme is not None:
            solved.append((N, K))
        if match is not None:
            chosen, count = 1, 1
            if experts is not None and spec.role == "expert":
                chosen, count = experts.chosen, experts.count
            layers[match[1]].append((N, K))
            passed += Fraction(N * K * chosen, count)
            if scheme is not None:
                inputs[match[1]][spec.fused_set or spec.module] = (K,) * chosen
    vocabulary, hidden = table[0].shape
    return Shapes(
        layers=tuple(map(tuple, layers.values())),
        inputs=tuple(tuple(chain.from_iterable(inputs[n].values())) for n in layers),
        solved=tuple(solved),
        vocabulary=vocabulary,
        hidden=hidden,
        active=int(passed),
        routed=experts is not None,
    )


def calibration_flops(shapes: Shapes, method: Method, windows: Windows) -> float:
    """Floating-point operations of a calibration; see the formulas above."""
    W, T = shapes.weights, windows.tokens
    flops = 2.0 * shapes.active * T * PASSES[method.codes]
    if method.codes == "gptq":
        flops += MOMENTS * T * sum(K * K for layer in shapes.inputs for K in layer)
        flops += SOLVE * sum(N * K * K for N, K in shapes.solved)
    if method.autoround:
        flops += 6.0 * W * STEP_TOKENS * AUTOROUND_STEPS
    return flops


def calibration_seconds(
    shapes: Shapes, method: Method, windows: Windows, device: str, rate: float
) -> float:
    """Time of a calibration.

    Args:
        rate: operations a second of plain products there.
    """
    return calibration_flops(shapes, method, windows) / (rate * SHARE[device])


def calibration_memory(
    shapes: Shapes, method: Method, windows: Windows, device: str, threads: int
) -> Memory:
    """Peak memory of a calibration."""
    workers = threads if device == "cpu" else 1
    largest = max(sum(map(math.prod, layer)) for layer in shapes.layers)
    width = max((K for layer in shapes.inputs for K in layer), default=1)
    widest = max(N for layer in shapes.layers for N, _ in layer)
    batch = max(BATCH_TOKENS[device], windows.length)
    batches = math.ceil(windows.tokens / batch)
    work = largest * (WEIGHT_BYTES + AUTOROUND_BYTES * method.autoround)
    work += min(batches, workers) * batch * (4 * widest + 8 * shapes.hidden) * 4
    if method.codes == "gptq":
        products = max(1, PRODUCTS_BYTES // (8 * width**2)) if device == "cpu" else 1
        work += (SQUARES + 2 * min(products, batches)) * 4 * width**2
        solving = [SOLVE_BYTES * N * K for layer in shapes.layers for N, K in layer]
        normals = max(N * (K // SMALL_GROUP) ** 2 for layer in shapes.layers for N, K in layer)
        work += max(solving) + NORMAL_BYTES * min(NORMAL_ELEMENTS, normals)
    # Sets of hidden states: the original's, the quantized model's, and both before the experts.
    sets = 1 if method.from_original else 4 if shapes.routed else 2
    window = sets * 4 * windows.length * shapes.hidden * 5 // 4
    work, states = work * 5 // 4, window * windows.count
    if device == "cpu":
        return Memory(BASE_BYTES + states + work, 0, window)
    return Memory(BASE_BYTES + states, states + work, window)


def check_memory(need: Memory, windows: Windows, device: str) -> None:
    """Refuse a calibration that does not fit.

    Raises:
        ResourceError: it takes more memory than is free.
    """
    free = free_bytes("cpu")
    if free is not None and need.ram > free:
        fitting = windows.count - math.ceil((need.ram - free) / need.window)
        raise ResourceError(
            f"calibration takes up to {need.ram / 1e9:.1f} GB of memory, free: {free / 1e9:.1f} GB",
            hint=f"give --calib-samples {fitting} or fewer, or a shorter --calib-length"
            if fitting > 0
            else "--method rtn takes a fixed amount of memory",
        )
    free = free_bytes(device) if device != "cpu" else None
    if free is None:
        return
    states = need.window * windows.count
    least = need.gpu - (states if STATES_SHARE * states > free else 0)
    if least > free:
        raise ResourceError(
            f"calibration takes up to {least / 1e9:.1f} GB of the GPU's memory, free: "
            f"{free / 1e9:.1f} GB",
            hint="--device cpu calibrates in the machine's memory; --method rtn needs less",
        )


def matmul_rate(device: torch.device, N: int, K: int) -> float:
    """Floating-point operations a second of products with a weight of a layer's shape.

    On a CPU every thread multiplies by itself, as calibration does.

    Returns:
        two operations for each multiplication and addition.
    """
    kind = device.type
    N, K = min(N, RATE_COLUMNS[kind]), min(K, RATE_COLUMNS[kind])
    x = torch.full((RATE_TOKENS[kind], K), 0.5, device=device)
    weight = torch.full((N, K), 0.5, device=device)
    flops = 2 * RATE_TOKENS[kind] * N * K

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
    seconds: float = RATE_SECONDS,
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
