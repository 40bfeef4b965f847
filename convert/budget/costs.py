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

import torch
from torch import Tensor

from lowbit.convert.original.device import tensor_cores
from lowbit.convert.original.divergence import Divergences, log_partition
from lowbit.convert.original.layer import Layer, stages
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.progress import Meter, Progress
from lowbit.convert.original.threads import Pool, alone_on_threads, for_each
from lowbit.convert.original.walk import (
    COST_ROWS,
    HEAD_ROWS,
    HEAD_TOKENS,
    blocks,
    embed,
    layers_ahead,
    load_norm,
    pass_through,
)
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.sets import RANKED_BITS, Choice, FusedSet
from lowbit.convert.quantize.linear import LinearQuantizer
from lowbit.convert.quantize.moments import measure
from lowbit.convert.quantize.rounding import rounding_error
from lowbit.convert.quantize.windows import WindowStates, begin
from lowbit.formats.architectures.names import split_layer
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.layout.scheme import Scheme

LEARNED = {"cpu": 16, "cuda": 64}  # windows that codes are learned from
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
    with (
        alone_on_threads(device) as pool,
        tensor_cores(device),
        layers_ahead([model], device) as layers,
    ):
        quantizer = LinearQuantizer(replace(method, autoround=False), rule, device, pool)
        # No window is held out to choose a damping by: even by 15 windows the least was best for
        # all linears of SmolLM2's first four layers and of Coder-0.5B's first two
        learned = begin(model, windows[0], device, from_original=True).only_learned
        hidden = embed(model, windows[1], device)
        variants: dict[FusedSet, Tensor] = {}
        for number in range(len(model.layers)):
            layer = next(layers)
            for states in variants.values():
                pass_through(layer, states, device, pool)
            here = [fused for fused in schemes if fused.layer == number]
            for fused, weights in _narrow(layer, here, base, learned, quantizer).items():
                own = {name: layer.weight(name).data for name in weights}
                sampled = [w[:: _stride(len(w))].contiguous() for w in own.values()]
                for scheme in {*schemes[fused], base[fused]}:
                    errors[fused, scheme] = _rounding(sampled, scheme, rule)
                variants[fused] = hidden.clone()
                layer.put(weights)
                pass_through(layer, variants[fused], device, pool)
                layer.put(own)
            pass_through(layer, hidden, device, pool)
            quantizer.pass_through(layer, learned.original)
            del layer  # or it is there beside the next two
            meter.add(2 * number + 1)
        norm = load_norm(model, device)
        for states in (learned.original, hidden, *variants.values()):
            pass_through(norm, states, device, pool)
        narrow: dict[FusedSet, Tensor] = {}
        for fused in (fused for fused in schemes if fused.layer is None):
            narrow[fused] = quantizer.head(model, base[fused], learned).weight.to(device)
            sampled = _head_rows(model, device)
            for scheme in {*schemes[fused], base[fused]}:
                errors[fused, scheme] = _rounding(sampled, scheme, rule)
        costs = _divergences(model, hidden, variants, narrow, pool)
        meter.add(2 * len(model.layers) + 1)
    if not all(map(math.isfinite, costs.values())):
        raise QuantizationError("the original gives NaN or infinite logits")
    return [
        max(0.0, costs[fused]) * errors[fused, scheme] / (errors[fused, base[fused]] or 1.0)
        for fused, scheme in choices
    ]


def _base(schemes: Sequence[Scheme]) -> Scheme:
    """The scheme at which a set is measured: 4 bits in the largest groups to choose from."""
    return Scheme(RANKED_BITS, max(scheme.group_size or 0 for scheme in schemes) or None)


def _narrow(
    layer: Layer,
    sets: Sequence[FusedSet],
    base: Mapping[FusedSet, Scheme],
    windows: WindowStates,
    quantizer: LinearQuantizer,
) -> dict[FusedSet, dict[str, Tensor]]:
    """Weights of a layer's sets as a calibration on its own input makes them, by linear."""
    members = {fused: [split_layer(module).rest for module in fused.modules] for fused in sets}
    names = [name for own in members.values() for name in own]
    narrowed: dict[FusedSet, dict[str, Tensor]] = {}
    device, pool = quantizer.device, quantizer.pool
    for group in stages(layer, windows.original[:1].to(device), names):
        moments = measure(layer, layer, group[0], windows, device, pool)
        for fused in (fused for fused, own in members.items() if own[0] in group):
            weights = {name: layer.weight(name).data for name in members[fused]}
            given = dict.fromkeys(weights, base[fused])
            chosen = quantizer.linears(weights, given, *moments)
            narrowed[fused] = {name: linear.weight for name, linear in chosen.items()}
    return narrowed


def _rounding(weights: Sequence[Tensor], scheme: Scheme, rule: ScaleRule) -> float:
    """Sum of the squared rounding errors of rows of linears."""
    return sum(float(rounding_error(part, scheme, rule).square().sum()) for part in weights)


def _stride(rows: int) -> int:
    """Rows of a linear from one that is sampled to the next."""
    return -(-rows // SAMPLED_ROWS)


def _head_rows(model: LayeredModel, device: torch.device) -> list[Tensor]:
    stride = _stride(model.vocabulary)
    blocks = model.weights.rows(model.head, HEAD_ROWS, device)
    return [torch.cat([rows[-first % stride :: stride] for first, rows in blocks])]


def _divergences(
    model: LayeredModel,
    hidden: Tensor,
    variants: Mapping[FusedSet, Tensor],
    heads: Mapping[FusedSet, Tensor],
    pool: Pool,
) -> dict[FusedSet, float]:
    """Mean KL from the original of every variant's states, and of other heads on its own states.

    Args:
        hidden: what the head sees in the original, [windows, T, h].
        heads: matrices [V, h] in place of its head's.
    """
    original = hidden[:, :-1].flatten(0, 1)
    changed = {fused: states[:, :-1].flatten(0, 1) for fused, states in variants.items()}
    log_z = log_partition(model, original, pool).to(torch.float32)
    sums = Divergences(len(changed) + len(heads), len(original), hidden.device)
    count = COST_ROWS[hidden.device.type]
    for first, rows in model.weights.rows(model.head, count, hidden.device):
        errors = [head[first : first + len(rows)] - rows for head in heads.values()]

        def add(part: slice, rows: Tensor = rows, errors: Sequence[Tensor] = errors) -> None:
            p = (original[part] @ rows.T).sub_(log_z[part, None]).exp_()
            for number, states in enumerate(changed.values()):
                sums.add(number, part, p, (states[part] - original[part]) @ rows.T)
            for number, error in enumerate(errors, len(changed)):
                sums.add(number, part, p, original[part] @ error.T)

        for_each(pool, add, blocks(len(original), HEAD_TOKENS[hidden.device.type]))
    return dict(zip((*changed, *heads), sums.means(), strict=True))
