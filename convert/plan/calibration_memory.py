"""Memory of a calibration, and of measuring the costs of bits, from the shapes of a model.

Counted as in `memory`. A calibration reads its limits here.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from lowbit.convert.original.walk import COST_ROWS, HEAD_TOKENS, LEARNING_TOKENS
from lowbit.convert.plan.calibration_cost import Shapes, Windows, shapes_of
from lowbit.convert.plan.memory import (
    BASE_BYTES,
    PARTS_BYTES,
    WORKER_BYTES,
    Memory,
    check_free,
    check_windows,
    placed,
)
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.sets import RANKED_BITS, FusedSet
from lowbit.formats.architectures import tensor_table
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.machine.memory import free_bytes

SOLVED_ROWS = {"cpu": 4096, "cuda": 32768}  # of the head at a time
STATES_SHARE = 3  # one part of so many of a GPU's free memory may be hidden states
WEIGHT_BYTES = 14  # original, its copy, the new one, two sets of codes
NEXT_BYTES = 4  # a weight of the next layer, which is read meanwhile
AUTOROUND_BYTES = 16  # a weight more: positions, gradients, their squares
SQUARES = 10  # K x K matrices in FP32: sums, also of windows held out, damped, ordered, factors
SUMS = 4  # of them, which are there while the products of batches are added up
# For each weight of the linears that are solved together: their rows, target, rest, steps, codes,
# slope and copies, 24.6 to 29.5 of which were measured, H and U included; and H times the target.
SOLVE_BYTES = 36
NORMAL_ELEMENTS = 1 << 26  # of the normal equations of the scales of some rows
NORMAL_BYTES = 12  # for each: equations, factors and a copy
SMALL_GROUP = 64  # weights that share a scale in those equations
PRODUCTS_BYTES = 4 << 30  # of batches' moments that threads hold at a time
AHEAD = 2  # of them that a thread makes before they are added up
INPUTS = 5  # of an expert's tokens: in both models, as they are and with capped norms, and squares


def check_calibration(need: Memory, windows: Windows, device: str) -> None:
    """Refuse a calibration that does not fit; hidden states may lie in RAM.

    Raises:
        ResourceError: it takes more memory than is free.
    """
    less = "give --calib-samples {} or fewer, or a shorter --calib-length"
    fixed = "--method rtn takes a fixed amount of memory"
    check_windows("calibration", need, windows.count, "cpu", less, fixed)
    free = free_bytes(device) if device != "cpu" else None
    states = need.window * windows.count
    if free is not None:
        least = need.gpu - (states if STATES_SHARE * states > free else 0)
        hint = "--device cpu calibrates in the machine's memory; --method rtn needs less"
        check_free("calibration", least, device, hint)


def products_at_a_time(K: int, sets: int, threads: int) -> int:
    """Batches whose moments, [K, K] of each set of states, exist before they are added up."""
    return min(AHEAD * threads, max(1, PRODUCTS_BYTES // (sets * 4 * K**2)))


def _solve_bytes(N: int, K: int, products: int, device: str) -> int:
    """Bytes of the moments of an input [tokens, K], and of the codes of all [N, K] that read it.

    Products of batches are freed before anything is factorized. On a GPU, where both have not been
    measured apart, they are counted together.

    Args:
        products: batches whose moments exist at a time.
    """
    made = 2 * products
    squares = (max(SQUARES, SUMS + made) if device == "cpu" else SQUARES + made) * 4 * K**2
    normals = min(NORMAL_ELEMENTS, N * (K // SMALL_GROUP) ** 2)
    parts = 0 if device == "cpu" else PARTS_BYTES * (K**2 + N * K)
    return squares + SOLVE_BYTES * N * K + NORMAL_BYTES * normals + parts


def _experts_bytes(shapes: Shapes, windows: Windows, workers: int, device: str) -> int:
    """Bytes of choosing the codes of experts, of which each worker has one.

    One of these sees twice as many tokens as an expert on average.
    """
    seen = min((workers + 1) * shapes.share, Fraction(workers))
    tokens = math.ceil(seen * windows.tokens)
    return max(
        (
            workers * _solve_bytes(N, K, 1, device) + 4 * INPUTS * tokens * K
            for N, K in shapes.of_expert
        ),
        default=0,
    )


def calibration_memory(
    shapes: Shapes, method: Method, windows: Windows, device: str, threads: int
) -> Memory:
    """Peak memory of a calibration.

    That of the largest layer, the next one, and the input that takes most, or of the head, whose
    codes lie in RAM twice; and of the hidden states of all windows, which are on a GPU where they
    take a third of its free memory at most.
    """
    workers = threads if device == "cpu" else 1
    largest = max(sum(map(math.prod, layer)) for layer in shapes.layers)
    widest = max(N for layer in shapes.layers for N, _ in layer)
    batch = max(LEARNING_TOKENS[device], windows.length)
    batches = math.ceil(windows.tokens / batch)
    passing = min(batches, workers) * batch * (4 * widest + 8 * shapes.hidden) * 4
    head, in_ram, solving = 0, 0, 0
    if (shapes.vocabulary, shapes.hidden) in shapes.solved:
        head = min(SOLVED_ROWS[device], shapes.vocabulary)
        in_ram = 2 * shapes.vocabulary * shapes.hidden
    of_head = head * shapes.hidden * WORKER_BYTES
    if method.codes == "gptq":
        for N, K in shapes.together:
            products = min(batches, products_at_a_time(K, 2, workers))
            solving = max(solving, _solve_bytes(N, K, products, device))
        solving = max(solving, _experts_bytes(shapes, windows, workers, device))
        of_head = _solve_bytes(head, shapes.hidden, 1, device) if head else 0
    of_weight = WEIGHT_BYTES + AUTOROUND_BYTES * method.autoround
    if len(shapes.layers) > 1:
        of_weight += NEXT_BYTES
    passed = passing + largest * of_weight
    # Sets of hidden states: the original's, the quantized model's, and both before the experts.
    sets = 1 if method.from_original else 4 if shapes.routed else 2
    window = sets * 4 * windows.length * shapes.hidden * 5 // 4
    states = window * windows.count
    if device == "cpu":  # a pass has as much again of copies, freed before linears are solved
        work = max((passed + passing) * 5 // 4, passed * 5 // 4 + solving)
        work = max(work, (of_head + in_ram) * 5 // 4)
        return Memory(BASE_BYTES + states + work, 0, window)
    work = max(passed + solving, of_head) * 5 // 4
    return Memory(BASE_BYTES + states + in_ram, states + work, window)


def costs_memory(
    config: Mapping[str, Any],
    sets: Sequence[FusedSet],
    method: Method,
    windows: tuple[int, int, int],
    device: str,
    threads: int,
) -> Memory:
    """Peak memory of measuring the cost of every set.

    Args:
        windows: to learn from, to measure on, and tokens of each.
    """
    learned, rotated, length = windows
    schemes = dict.fromkeys((m for fused in sets for m in fused.modules), Scheme(RANKED_BITS))
    given = Windows(learned, length)
    base = calibration_memory(shapes_of(config, schemes), method, given, device, threads)
    V, h = tensor_table(config)[0].shape
    window = (len(sets) + 2) * length * h * 4 * 5 // 4
    workers = threads + 1 if device == "cpu" else 1
    logits = 4 * HEAD_TOKENS[device] * min(V, COST_ROWS[device]) * 4 * workers
    work = rotated * window + 3 * V * h * 4 + logits
    return placed(base.ram, base.gpu + work, window, device)
