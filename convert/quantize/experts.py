"""Codes and scales of a layer's experts, each by the tokens that are routed to it.

All tokens' inputs of the MLP are kept, of the model quantized so far and of the original, with the
routes that the router takes now. An expert's moments are those of its own tokens in both models. An
expert with few tokens has nothing to learn from and is rounded to nearest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lowbit.convert.original.experts import ROUTER, Expert
from lowbit.convert.original.layer import Layer, probed
from lowbit.convert.original.threads import ordered
from lowbit.convert.original.walk import LEARNING_TOKENS, batches
from lowbit.convert.quantize.linear import LinearQuantizer, QuantizedLinear, nearest
from lowbit.convert.quantize.moments import paired
from lowbit.convert.quantize.windows import WindowStates
from lowbit.formats.architectures.names import expert_of
from lowbit.formats.layout.scheme import Scheme

ROUTED = 8192  # tokens that pass through a router at a time
FEWEST_TOKENS = 64  # from which on an expert's own tokens decide


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens before the experts of a layer."""

    x: Tensor  # [tokens, h] float32, inputs of the MLP in the model quantized so far
    y: Tensor  # same in the original
    routes: Tensor  # [tokens, chosen] numbers of experts
    learned: int  # tokens to learn from, which come first; the others are held out

    def tokens_of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Numbers of the tokens that an expert sees: to learn from, and held out."""
        tokens = (self.routes == expert).any(-1).nonzero()[:, 0]
        return tokens[tokens < self.learned], tokens[tokens >= self.learned]


def split(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of linears outside of experts, and of experts."""
    experts = [name for name in names if expert_of(name) is not None]
    return [name for name in names if expert_of(name) is None], experts


def tokens_of_experts(seen: Mapping[str, int]) -> tuple[int, ...]:
    """Tokens of every expert, by number, from those of its linears by name; empty without any."""
    counts = {
        number: count for name, count in seen.items() if (number := expert_of(name)) is not None
    }
    return tuple(counts[number] for number in sorted(counts))


def route(
    layer: Layer, original: Layer, mlp: str, windows: WindowStates, device: torch.device
) -> Routed:
    """Inputs of a layer's MLP over all windows, and their routes."""
    router = f"{mlp}.{ROUTER}"
    x, y = torch.empty_like(windows.hidden), torch.empty_like(windows.original)
    for side, states, out in ((layer, windows.hidden, x), (original, windows.original, y)):
        with torch.no_grad(), probed(side, router) as probe:
            for part in batches(states, device, LEARNING_TOKENS):
                out[part] = probe(states[part].to(device)).view(out[part].shape).to(out.device)
    flat = x.flatten(0, 1)
    choose = layer.module.get_submodule(router)
    with torch.no_grad():
        routes = [choose(part.to(device))[2].to(flat.device) for part in torch.split(flat, ROUTED)]
    learned = windows.learned * x.shape[1]
    return Routed(flat, y.flatten(0, 1), torch.cat(routes), learned)


def choose_experts(
    quantizer: LinearQuantizer,
    layer: Layer,
    original: Layer,
    schemes: Mapping[str, Scheme],
    windows: WindowStates,
) -> tuple[dict[str, QuantizedLinear], tuple[int, ...]]:
    """Choose the linears of all experts of a layer, and put them in place.

    Args:
        schemes: of the experts' linears, by name within the layer.

    Returns:
        Linears by name, and the tokens that every expert learned from.

    Raises:
        QuantizationError: activations are not finite.
    """
    mlp = next(iter(schemes)).partition(".experts.")[0]
    routed = route(layer, original, mlp, windows, quantizer.device)
    count = len(layer.module.get_submodule(f"{mlp}.experts"))  # type: ignore[arg-type]

    def one(number: int) -> tuple[dict[str, QuantizedLinear], int]:
        prefix = f"{mlp}.experts.{number}"
        own = {name: scheme for name, scheme in schemes.items() if expert_of(name) == number}
        learned, heldout = routed.tokens_of(number)
        if len(learned) < FEWEST_TOKENS:
            linears = {n: nearest(layer.weight(n).data, s, quantizer.rule) for n, s in own.items()}
        else:
            linears = _choose(quantizer, layer, original, prefix, own, routed, (learned, heldout))
        layer.put({name: linear.weight for name, linear in linears.items()})
        return linears, len(learned)

    chosen: dict[str, QuantizedLinear] = {}
    tokens = []
    for linears, seen in ordered(quantizer.pool, one, range(count)):
        chosen |= linears
        tokens.append(seen)
    return chosen, tuple(tokens)


def _choose(
    quantizer: LinearQuantizer,
    layer: Layer,
    original: Layer,
    prefix: str,
    schemes: Mapping[str, Scheme],
    routed: Routed,
    tokens: tuple[Tensor, Tensor],
) -> dict[str, QuantizedLinear]:
    """One expert by its own tokens: gate and up, then down, which reads what they give."""
    here, there = (cast(Expert, side.module.get_submodule(prefix)) for side in (layer, original))
    device = quantizer.device
    inputs = [(routed.x[part].to(device), routed.y[part].to(device)) for part in tokens]
    linears: dict[str, QuantizedLinear] = {}
    for kinds in (("gate_proj", "up_proj"), ("down_proj",)):
        names = [name for kind in kinds if (name := f"{prefix}.{kind}") in schemes]
        if names:
            weights = {name: layer.weight(name).data for name in names}
            heldout = paired(*inputs[1], names[0]) if len(inputs[1][0]) >= FEWEST_TOKENS else None
            linears |= quantizer.linears(weights, schemes, paired(*inputs[0], names[0]), heldout)
            layer.put({name: linears[name].weight for name in names})
        if kinds[0] == "gate_proj":
            inputs = [(here.inner(x), there.inner(y)) for x, y in inputs]
    return linears
