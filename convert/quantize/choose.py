"""The codes and scales of one layer's linears."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit.convert.original.layer import Layer, stages
from lowbit.convert.quantize.experts import (
    FEWEST_TOKENS,
    choose_experts,
    split,
    tokens_of_experts,
)
from lowbit.convert.quantize.learned import learn_rounding
from lowbit.convert.quantize.linear import LinearQuantizer, QuantizedLinear, nearest, weighted
from lowbit.convert.quantize.moments import input_power, measure
from lowbit.convert.quantize.store import LayerError
from lowbit.convert.quantize.windows import WindowStates, output_error
from lowbit.formats.architectures.names import expert_of
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.scheme import Scheme

# A few tokens have activations a thousand times those of others, which single weights of a
# `down_proj` can make (Yu et al., The Super Weight, arXiv 2411.07191). `token_norm_caps` lets them
# count like others, so codes may lose them, and with them all layers behind. On SmolLM2-135M off
# its grid, with 32 windows, the error of layer 11 became .86 where round-to-nearest has .06.
MOST_WORSE = 2.0  # times the error of round-to-nearest
LAST = "down_proj"


def choose_layer(
    quantizer: LinearQuantizer,
    number: int,
    layer: Layer,
    original: Layer,
    schemes: Mapping[str, Scheme],
    windows: WindowStates,
) -> tuple[dict[str, QuantizedLinear], LayerError]:
    """Choose a layer's linears and put them in place; passes the original's states on.

    Args:
        schemes: of the linears to quantize, by name within the layer.

    Raises:
        QuantizationError: activations are not finite.
    """
    before = windows.original[windows.heldout].clone()
    alone = quantizer.method.from_original
    if alone:
        quantized, tokens = _from_original(quantizer, original, schemes, windows)
    else:
        quantized, tokens = _sequential(quantizer, layer, original, schemes, windows)
        quantizer.pass_through(original, windows.original)
    after = windows.original[windows.heldout]
    added = _finite_power(number, before, after)
    given = before if alone else windows.hidden[windows.heldout]

    def error(
        linears: Mapping[str, QuantizedLinear], x: Tensor = given, y: Tensor = after
    ) -> float:
        layer.put({name: linear.weight for name, linear in linears.items()})
        square = output_error(layer, x, y, quantizer.device)
        return math.sqrt(square / added) if added else 0.0

    plain = {n: nearest(original.weight(n).data, s, quantizer.rule) for n, s in schemes.items()}
    rtn, chosen = error(plain), error(quantized)
    if chosen > MOST_WORSE * rtn:
        mixed = quantized | {n: linear for n, linear in plain.items() if n.endswith(LAST)}
        tried = (chosen, quantized), (error(mixed), mixed), (rtn, plain)
        chosen, quantized = min(tried, key=lambda each: each[0])
    del plain
    if not math.isfinite(chosen):
        raise QuantizationError(
            f"layer {number} gives values that are not finite once it is quantized",
            hint="try another --calib text, or --method rtn",
        )
    if quantizer.method.autoround and schemes:
        better = learn_rounding(
            layer, original, quantized, schemes, windows, quantizer.device, quantizer.pool
        )
        if (learned := error(better)) < chosen:
            quantized, chosen = better, learned
    seen = None
    if not alone and windows.holds_out:
        count = len(after)
        seen = error(quantized, windows.hidden[:count], windows.original[:count])
    layer.put({name: linear.weight for name, linear in quantized.items()})
    return quantized, LayerError(number, rtn, chosen, seen, tokens)


def _from_original(
    quantizer: LinearQuantizer,
    original: Layer,
    schemes: Mapping[str, Scheme],
    windows: WindowStates,
) -> tuple[dict[str, QuantizedLinear], tuple[int, ...]]:
    """Scales weighted by the inputs' power in the original, whose states are passed on."""
    power = input_power(original, list(schemes), windows.original, quantizer.device, quantizer.pool)
    quantized = {}
    for name, scheme in schemes.items():
        w, seen = original.weight(name).data, power[name]
        if expert_of(name) is not None and seen.tokens < FEWEST_TOKENS:
            quantized[name] = nearest(w, scheme, quantizer.rule)
        else:
            quantized[name] = weighted(w, scheme, quantizer.rule, seen.mean)
    return quantized, tokens_of_experts({name: seen.tokens for name, seen in power.items()})


def _sequential(
    quantizer: LinearQuantizer,
    layer: Layer,
    original: Layer,
    schemes: Mapping[str, Scheme],
    windows: WindowStates,
) -> tuple[dict[str, QuantizedLinear], tuple[int, ...]]:
    """All linears of a layer, each put in place before those that read its output."""
    linears: dict[str, QuantizedLinear] = {}
    if quantizer.method.codes == "rtn":
        linears = {n: nearest(layer.weight(n).data, s, quantizer.rule) for n, s in schemes.items()}
        return linears, ()
    window = windows.hidden[:1].to(quantizer.device)
    common, experts = split(list(schemes))
    for names in stages(layer, window, common):
        moments = measure(layer, original, names[0], windows, quantizer.device, quantizer.pool)
        weights = {name: layer.weight(name).data for name in names}
        linears |= quantizer.linears(weights, schemes, *moments)
        layer.put({name: linears[name].weight for name in names})
    if not experts:
        return linears, ()
    own = {name: schemes[name] for name in experts}
    chosen, tokens = choose_experts(quantizer, layer, original, own, windows)
    return linears | chosen, tokens


def _finite_power(number: int, before: Tensor, after: Tensor) -> float:
    """Mean square of what a layer of the original adds to its input."""
    added = float((after - before).square().mean(dtype=torch.float64))
    if not math.isfinite(added):
        raise QuantizationError(
            f"layer {number} gives values that are not finite on the calibration text",
            hint="try another --calib text; the checkpoint may be damaged",
        )
    return added
