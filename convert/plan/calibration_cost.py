"""Work of a calibration, and the time that it takes, from the shapes of a model alone.

Operations, two for each multiplication and addition, with T tokens and W weights in the linears of
the decoder's layers:

    passes      2 W T PASSES        layers passed through, originals and quantized ones; of experts
                                    W counts those that a token is routed to
    moments     4 K^2 T             gptq: E[x x^T] and E[x~ x^T] of every input of K values
    solve       SOLVE N K^2         gptq: factor, codes, scales and sweeps of a linear [N, K]
    autoround   6 W B STEPS         forward and backward, STEPS batches of B tokens a layer
    costs       W t SETS            measured: each of SETS variants passes half of the layers on
                                    average, with t tokens, and the head: 2 V h t (SETS + 1)
    estimates   2 (6 W + 8 V h) t   of costs: one pass forward and one backward
    report      2 (W + V h + 2 L h l) t   of t tokens that a model passes in windows of l, through
                                    L layers; the original and the packed model pass the text

They run at SHARE of the rate of plain matrix products; the rest is attention, norms, columns of
codes chosen one by one, and reading weights.
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from lowbit.convert.original.device import tensor_cores
from lowbit.convert.original.threads import alone_on_threads
from lowbit.convert.plan.method import Method
from lowbit.formats.architectures import read_config, tensor_table
from lowbit.formats.architectures.names import expert_of
from lowbit.formats.layout.scheme import Scheme

PASSES = {"rtn": 1.0, "weighted": 1.0, "gptq": 4.3}  # of the layers, by how codes are chosen
MOMENTS = 4  # K^2 operations a token
SOLVE = 16  # N K^2 operations
STEP_TOKENS = 2048  # B, of a step of autoround
AUTOROUND_STEPS = 200
# Shares of the rate of plain products, which is measured: costs and calibration of an 8B are 2.1e16
# in 77 and 98 s on an H200, whose products make 4e14 a second.
SHARE = {"cpu": 0.6, "cuda": 0.3}
# Shares of a calibration's rate that a report has: an 8B's 8.6e15 take 96 s of that H200, sums
# aside, since it multiplies finer numbers.
REPORT_SHARE = {"cpu": 1.0, "cuda": 0.75}

# Rates of two machines, for a choice and an estimate: others differ. Of gptq, operations a second
# and core: SmolLM2-135M's 45e12 in 7.5 min on two cores of an EPYC with AVX-512. Constant, so that
# one command chooses one method on one machine.
CORE_RATE = 50e9
# Operations a second of each of the 132 multiprocessors of an H200: gptq+rotate of Coder-1.5B is
# 1.5e15 in 75 s, of an 8B 6.7e15 in 125 s, each beside the rounding.
MULTIPROCESSOR_RATE = 3e11
# Weights that are read, rounded to nearest and written in a second: Qwen3-1.7B in 27 s on two of
# the cores, Qwen3-8B in 41 s with an H200.
ROUNDED = {"cpu": 32e6, "cuda": 200e6}  # on a CPU for each core

# Seconds of a step of autoround on a GPU at least, by the launches of its kernels: SmolLM2-135M
# takes 99 s for 30 layers on an H200, Coder-0.5B 87 s for 24.
STEP_SECONDS = {"cpu": 0.0, "cuda": 0.016}
# Seconds that a report's sums in FP64 take for a token and row of the head, on a CPU for each core.
# Measured on a Xeon with AVX-512; on a GPU an estimate.
LOGIT_SECONDS = {"cpu": 1e-8, "cuda": 2e-10}
START_SECONDS = {"cpu": 5.0, "cuda": 15.0}  # of imports and first kernels, where a text is read

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


@dataclass(frozen=True)
class Shapes:
    """The matrices that a calibration passes through."""

    layers: tuple[tuple[tuple[int, int], ...], ...]  # of each decoder layer, every matrix [N, K]
    # Of each decoder layer, K of every input that a quantized linear reads; of experts as often as
    # a token is routed to one.
    inputs: tuple[tuple[int, ...], ...]
    solved: tuple[tuple[int, int], ...]  # [N, K] of each quantized linear, the head included
    # [N, K] of the linears of a layer that read one input, those of experts aside
    together: frozenset[tuple[int, int]]
    vocabulary: int  # rows of the head
    hidden: int  # its columns
    active: int  # weights of the matrices of all layers that a token passes through
    routed: bool  # there are experts, of which a token passes through some
    # [N, K] of the linears of an expert that read one input
    of_expert: frozenset[tuple[int, int]] = frozenset()
    share: Fraction = Fraction(1)  # of the tokens, that an expert sees on average

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
    """The matrices of a model."""
    table, experts = tensor_table(config, names), read_config(config).experts
    passed = Fraction(0)
    layers: dict[str, list[tuple[int, int]]] = defaultdict(list)
    inputs: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    together: dict[tuple[str, int | None], tuple[int, int]] = {}  # by name and expert
    of_expert: dict[tuple[str, int | None], tuple[int, int]] = {}
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
                name = spec.fused_set or spec.module
                inputs[match[1]][name] = (K,) * chosen
                expert = expert_of(spec.module)
                of_one = together if expert is None else of_expert
                of_one[name, expert] = (of_one.get((name, expert), (0, K))[0] + N, K)
    vocabulary, hidden = table[0].shape
    return Shapes(
        layers=tuple(map(tuple, layers.values())),
        inputs=tuple(tuple(chain.from_iterable(inputs[n].values())) for n in layers),
        solved=tuple(solved),
        together=frozenset(together.values()),
        vocabulary=vocabulary,
        hidden=hidden,
        active=int(passed),
        routed=experts is not None,
        of_expert=frozenset(of_expert.values()),
        share=Fraction(1) if experts is None else Fraction(experts.chosen, experts.count),
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


def costs_flops(shapes: Shapes, sets: int, learned: Windows, measured: Windows) -> float:
    """Floating-point operations of measuring the cost of every fused set, the head's included."""
    passes = shapes.active * measured.tokens * sets
    head = 2.0 * shapes.vocabulary * shapes.hidden * measured.tokens * (sets + 1)
    return passes + head + calibration_flops(shapes, Method("gptq"), learned)


def estimates_flops(shapes: Shapes, measured: Windows) -> float:
    """Floating-point operations of estimating the cost of every fused set."""
    head = shapes.vocabulary * shapes.hidden
    return 2.0 * measured.tokens * (6 * shapes.active + 8 * head)


def report_seconds(
    shapes: Shapes, passed: Collection[Windows], compared: int, device: str, units: int, rate: float
) -> float:
    """Time of a report.

    Args:
        passed: windows that models pass, each as often as one does.
        compared: tokens whose logits are compared.
        units: cores of a CPU.
        rate: operations a second of a calibration there.
    """
    weights = shapes.active + shapes.vocabulary * shapes.hidden
    attention = 2 * len(shapes.layers) * shapes.hidden  # a token and token of its window
    flops = sum(2.0 * each.tokens * (weights + attention * each.length) for each in passed)
    sums = LOGIT_SECONDS[device] * compared * shapes.vocabulary
    return flops / (rate * REPORT_SHARE[device]) + sums / (units if device == "cpu" else 1)


def operations_a_second(device: str, units: int) -> float:
    """Operations a second of a calibration by the constants of two machines.

    Args:
        units: cores of a CPU, multiprocessors of a GPU.
    """
    return units * (CORE_RATE if device == "cpu" else MULTIPROCESSOR_RATE)


def conversion_seconds(
    shapes: Shapes, method: Method, windows: Windows, device: str, units: int, rate: float
) -> float:
    """Time of a whole conversion.

    Args:
        units: cores of a CPU, multiprocessors of a GPU.
        rate: operations a second of a calibration there.
    """
    weights = shapes.weights + shapes.vocabulary * shapes.hidden
    seconds = rounding_seconds(weights, device, units)
    if not method.calibrated:
        return seconds
    seconds += START_SECONDS[device]
    calibration = calibration_flops(shapes, method, windows) / rate
    if not method.autoround:
        return seconds + calibration
    plain = calibration_flops(shapes, replace(method, autoround=False), windows) / rate
    steps = STEP_SECONDS[device] * AUTOROUND_STEPS * len(shapes.layers)
    return seconds + max(calibration, plain + steps)


def rounding_seconds(weights: int, device: str, units: int) -> float:
    """Time in which weights are read, rounded to nearest and written."""
    return weights / (ROUNDED[device] * (units if device == "cpu" else 1))


def measured_rate(device: torch.device, shapes: Shapes) -> float:
    """Operations a second of a calibration, by products that are measured now."""
    return SHARE[device.type] * matmul_rate(device, *shapes.largest)


def matmul_rate(device: torch.device, N: int, K: int) -> float:
    """Floating-point operations a second of products with a weight of a layer's shape.

    On a CPU every thread multiplies by itself, as calibration does. Of a GPU the fastest product
    counts: beside other work it has whole slices of time, and others pass between two products.

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
            return flops * calls_a_second(multiply, fastest=True)
        threads = torch.get_num_threads()
        futures = [pool.submit(calls_a_second, multiply) for _ in range(threads)]
        return flops * sum(future.result() for future in futures)


def calls_a_second(
    call: Callable[[], None],
    seconds: float = RATE_SECONDS,
    now: Callable[[], float] = time.perf_counter,
    fastest: bool = False,
) -> float:
    """Calls that are made within some seconds, at least one, over the time that they take.

    Args:
        fastest: as if all took as long as the fastest.
    """
    start = before = now()
    count, least = 0, math.inf
    while True:
        call()
        count += 1
        after = now()
        least, before = min(least, after - before), after
        if after - start >= seconds:
            return 1 / least if fastest else count / (after - start)
