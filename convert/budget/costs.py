"""Costs of precisions end to end: the original's KL with one fused set quantized by a method.

The original passes layer by layer, and beside it a variant for every set, which differs from it by
that set's 4-bit weights alone. Codes are learned as in a conversion, but from the original's own
states, so that none makes up for errors of others; the KL is that of windows which nothing was
learned from. Costs of different sets add up: on SmolLM2-135M and Qwen2.5-Coder-0.5B, groups of 64
and 128, `gptq+rotate`, they sum to .105 and .0348, and all sets at once cost .107 and .0356.

Other widths and group sizes cost as much less, or more, as their squared rounding error is smaller
or larger: of 3 bits four times as much (measured: 3.9), of 8 bits 1/250.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.original.device import tensor_cores
from lowbit.convert.original.layer import Layer, run, stages
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.progress import Meter, Progress
from lowbit.convert.original.threads import Pool, alone_on_threads, ordered
from lowbit.convert.original.walk import (
    HEAD_TOKENS,
    blocks,
    embed,
    load_layer,
    load_norm,
    pass_through,
)
from lowbit.convert.plan import calibration_cost
from lowbit.convert.plan.calibration_cost import Memory, calibration_memory, shapes_of
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.sets import Choice, FusedSet
from lowbit.convert.quantize.linear import LinearQuantizer
from lowbit.convert.quantize.moments import measure
from lowbit.convert.quantize.rounding import rounding_error
from lowbit.convert.quantize.windows import WindowStates, begin
from lowbit.formats.architectures import tensor_table
from lowbit.formats.architectures.names import split_layer
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.layout.scheme import Scheme

LEARNED = {"cpu": 16, "cuda": 64}  # windows that codes are learned from
MEASURED_BITS = 4
SAMPLED_ROWS = 128  # of a linear, whose rounding errors stand for all


def measured_costs(
    model: LayeredModel,
    choices: Sequence[Choice],
    windows: tuple[Tensor, Tensor],
    method: Method,
    rule: ScaleRule,
    device: torch.device,
    progress: Progress,
) -> list[float]:
    """KL divergence from the original for every choice, where only its set is quantized.

    Args:
        model: the original, rotated or not; call without gradients.
        choices: every set of the model, each with one scheme or more; no experts.
        windows: [windows, T] int64 token ids to learn codes from, and others to measure on; the
            last token of a window is not scored.

    Returns:
        Nats a token, in the order of the choices.

    Raises:
        CheckpointError: weights or tokens that do not fit the model.
        QuantizationError: activations or costs are not finite.
    """
    schemes: dict[FusedSet, list[Scheme]] = {}
    for fused, scheme in choices:
        schemes.setdefault(fused, []).append(scheme)
    base = {fused: _base(given) for fused, given in schemes.items()}
    errors: dict[Choice, float] = {}
    meter = Meter(progress, "sensitivity", (len(model.layers) + 1) ** 2)
    with alone_on_threads(device) as pool, tensor_cores(device):
        quantizer = LinearQuantizer(replace(method, autoround=False), rule, device, pool)
        learned = begin(model, windows[0], device, from_original=True)
        hidden = embed(model, windows[1], device)
        variants: dict[FusedSet, Tensor] = {}
        for number in range(len(model.layers)):
            layer = load_layer(model, number, device)
            for states in variants.values():
                pass_through(layer, states, pool)
            here = [fused for fused in schemes if fused.layer == number]
            for fused, weights in _narrow(layer, here, base, learned, quantizer).items():
                own = {name: layer.weight(name).data for name in weights}
                for scheme in {*schemes[fused], base[fused]}:
                    errors[fused, scheme] = _rounding(list(own.values()), scheme, rule)
                variants[fused] = hidden.clone()
                layer.put(weights)
                pass_through(layer, variants[fused], pool)
                layer.put(own)
            pass_through(layer, hidden, pool)
            run(layer, learned.original, device, pool)
            meter.add(2 * number + 1)
        norm = load_norm(model, device)
        for states in (learned.original, hidden, *variants.values()):
            run(norm, states, device, pool)
        head = torch.cat([rows for _, rows in model.weights.rows(model.head, 1 << 16, device)])
        narrow: dict[FusedSet, Tensor] = {}
        for fused in (fused for fused in schemes if fused.layer is None):
            narrow[fused] = quantizer.head(model, base[fused], learned).weight.to(device)
            for scheme in {*schemes[fused], base[fused]}:
                errors[fused, scheme] = _rounding([head], scheme, rule)
        costs = _divergences(hidden, head, variants, narrow, pool)
        meter.add(2 * len(model.layers) + 1)
    if not all(map(math.isfinite, costs.values())):
        raise QuantizationError("the original gives NaN or infinite logits")
    return [
        max(0.0, costs[fused]) * errors[fused, scheme] / (errors[fused, base[fused]] or 1.0)
        for fused, scheme in choices
    ]


def _base(schemes: Sequence[Scheme]) -> Scheme:
    """The scheme at which a set is measured: 4 bits in the largest groups to choose from."""
    return Scheme(MEASURED_BITS, max(scheme.group_size or 0 for scheme in schemes) or None)


def _narrow(
    layer: Layer,
    sets: Sequence[FusedSet],
    base: Mapping[FusedSet, Scheme],
    windows: WindowStates,
    quantizer: LinearQuantizer,
) -> dict[FusedSet, dict[str, Tensor]]:
    """Weights of a layer's sets as a calibration on its own input makes them, by linear."""
    members = {fused: [split_layer(module).rest for module in fused.modules] for fused in sets}
    names = [name for found in members.values() for name in found]
    found: dict[FusedSet, dict[str, Tensor]] = {}
    device, pool = quantizer.device, quantizer.pool
    for group in stages(layer, windows.original[:1].to(device), names):
        moments = measure(layer, layer, group[0], windows, device, pool)
        for fused in (fused for fused, own in members.items() if own[0] in group):
            weights = {name: layer.weight(name).data for name in members[fused]}
            given = dict.fromkeys(weights, base[fused])
            chosen = quantizer.linears(weights, given, *moments)
            found[fused] = {name: linear.weight for name, linear in chosen.items()}
    return found


def _rounding(weights: Sequence[Tensor], scheme: Scheme, rule: ScaleRule) -> float:
    """Sum of the squared rounding errors of some rows of linears."""
    rows = (w[:: -(-len(w) // SAMPLED_ROWS)].contiguous() for w in weights)
    return sum(float(rounding_error(part, scheme, rule).square().sum()) for part in rows)


def _divergences(
    hidden: Tensor,
    head: Tensor,
    variants: Mapping[FusedSet, Tensor],
    heads: Mapping[FusedSet, Tensor],
    pool: Pool,
) -> dict[FusedSet, float]:
    """Mean KL from the original of every variant's states, and of other heads on its own states.

    Args:
        hidden: what the head sees in the original, [windows, T, h].
        head: the original's, [V, h] float32.
        variants: states in place of the original's.
        heads: matrices in place of its head's.
    """
    h = hidden.shape[-1]
    wanted = hidden[:, :-1].reshape(-1, h)
    others = [(fused, states[:, :-1].reshape(-1, h), head) for fused, states in variants.items()]
    others += [(fused, wanted, matrix) for fused, matrix in heads.items()]
    totals = dict.fromkeys((fused for fused, _, _ in others), 0.0)
    kind = hidden.device.type
    for part in blocks(len(wanted), HEAD_TOKENS[kind] // 2):
        p = (wanted[part] @ head.T).log_softmax(-1)
        pairs = [(states[part], matrix) for _, states, matrix in others]
        found = ordered(pool, partial(_divergence, p), pairs)
        for (fused, _, _), total in zip(others, found, strict=True):
            totals[fused] += total
    return {fused: total / len(wanted) for fused, total in totals.items()}


def _divergence(p: Tensor, other: tuple[Tensor, Tensor]) -> float:
    """Sum of the KL over tokens, from log-probabilities [n, V], states [n, h] and a head [V, h]."""
    states, head = other
    q = (states @ head.T).log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).sum(dtype=torch.float64))


def costs_memory(
    config: Mapping[str, Any],
    sets: Sequence[FusedSet],
    method: Method,
    windows: tuple[int, int, int],
    device: str,
    threads: int,
) -> Memory:
    """Memory that measuring takes at most, the interpreter in RAM included.

    Args:
        windows: to learn from, to measure on, and tokens of each.
    """
    learned, held, length = windows
    schemes = dict.fromkeys((m for fused in sets for m in fused.modules), Scheme(MEASURED_BITS))
    given = calibration_cost.Windows(learned, length)
    base = calibration_memory(shapes_of(config, schemes), method, given, device, threads)
    V, h = tensor_table(config)[0].shape
    window = (len(sets) + 2) * length * h * 4 * 5 // 4
    workers = threads + 1 if device == "cpu" else 1
    logits = 4 * HEAD_TOKENS[device] // 2 * V * 4 * workers
    work = held * window + 3 * V * h * 4 + logits
    if device == "cpu":
        return Memory(base.ram + work, 0, window)
    return Memory(base.ram, base.gpu + work, window)
