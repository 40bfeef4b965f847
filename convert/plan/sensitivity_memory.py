"""Peak memory of a pass for sensitivities, estimated from shapes before it begins.

With T tokens in all, t of a window, h wide, and DRAWS tokens drawn at each position:
    kept      layers * T * h * 2 bytes in RAM, the input of every layer
    states    (1 + 2 * DRAWS) * T * h * 4, outputs, and gradients above and below a layer
    layer     its weights in FP32, the squares of their gradients, the largest of them three times
              more while it is read and rounded, and for each window under way what its linears take
              and give, 1 + DRAWS times, and its attention's t * t scores of every head three times
    head      HEAD_ROWS rows of h as they are and once a scheme, and blocks of logits
and a quarter more for what the allocator keeps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.convert.original.walk import HEAD_ROWS, HEAD_TOKENS
from lowbit.convert.plan.calibration_cost import BASE_BYTES, Memory
from lowbit.formats.architectures import read_config, tensor_table
from lowbit.formats.architectures.names import MTP_PREFIX, split_layer
from lowbit.formats.architectures.table import TensorSpec

SCORES = 3  # sets of attention's scores: forward, softmax and gradient


def sensitivity_memory(
    config: Mapping[str, Any],
    windows: tuple[int, int],
    schemes: int,
    draws: int,
    device: str,
    threads: int,
) -> Memory:
    """Memory that a pass needs at most, the interpreter in RAM included.

    Args:
        config: config.json of the original.
        windows: windows of the text, and tokens of each.
        schemes: of the head.
        draws: tokens drawn at each position.
        device: `cpu` or `cuda`.
        threads: of the CPU, each with a window of its own.
    """
    count, t = windows
    sizes = read_config(config)
    table = tensor_table(config)
    V, h = table[0].shape
    layers: dict[int, list[TensorSpec]] = {}
    for spec in table:
        prefix, number, _ = split_layer(spec.name)
        if number is not None and prefix != MTP_PREFIX:
            layers.setdefault(number, []).append(spec)
    workers = min(count, threads) if device == "cpu" else 1
    shares = 1.0 if sizes.experts is None else sizes.experts.chosen / sizes.experts.count
    scores = SCORES * sizes.num_attention_heads * t * t
    layer = max(
        _layer_values(specs, t, draws, shares, scores, workers) for specs in layers.values()
    )
    rows = min(V, HEAD_ROWS)
    # A block's logits, their differences by a scheme, and sums of probabilities in FP64.
    blocks = min(count * t, HEAD_TOKENS[device] * workers) * rows * (2 + 2 + 4)
    head = rows * h * (2 + schemes) + blocks + draws * count * t * h
    window = 4 * (1 + 2 * draws) * t * h * 5 // 4
    kept = 2 * len(layers) * t * h
    work = count * window + 4 * max(layer, head) * 5 // 4
    ram = BASE_BYTES + count * kept
    if device == "cpu":
        return Memory(ram + work, 0, window + kept)
    return Memory(ram, work, window + kept)


def _layer_values(
    specs: Sequence[TensorSpec], t: int, draws: int, shares: float, scores: int, workers: int
) -> int:
    """FP32 values of a layer and its activations, the sets of states aside."""
    sizes = [math.prod(spec.shape) for spec in specs]
    ends = sum(
        sum(spec.shape) * (shares if spec.role == "expert" else 1.0)
        for spec in specs
        if len(spec.shape) == 2
    )
    traced = math.ceil(t * ends * (2 + draws))
    return 2 * sum(sizes) + 3 * max(sizes) + workers * (traced + scores)
