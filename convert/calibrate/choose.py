"""The codes and scales of one layer's linears, and of the head."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.calibrate.experts import (
    FEWEST_TOKENS,
    choose_experts,
    split,
    tokens_of_experts,
)
from lowbit.convert.calibrate.gptq import Factor, factorize
from lowbit.convert.calibrate.learned import Learned, learn_rounding
from lowbit.convert.calibrate.linear import (
    DAMPINGS,
    Chosen,
    choose_damping,
    gptq,
    nearest,
    weighted,
)
from lowbit.convert.calibrate.moments import Moments, head_moments, input_power, measure
from lowbit.convert.calibrate.store import LayerError
from lowbit.convert.calibrate.windows import Windows, output_error
from lowbit.convert.original.device import full_precision
from lowbit.convert.original.layer import Layer, run, stages
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.threads import Pool
from lowbit.convert.plan.method import Method
from lowbit.formats.architectures.names import expert_of
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.layout.scheme import Scheme

HEAD_ROWS = {"cpu": 4096, "cuda": 32768}  # of the vocabulary at a time


@dataclass(frozen=True, slots=True)
class LayerQuantizer:
    """The way linears are chosen, and the place."""

    method: Method  # the steps
    rule: ScaleRule  # how scales are searched
    device: torch.device  # where to compute
    pool: Pool  # of `alone_on_threads`

    def layer(
        self,
        number: int,
        layer: Layer,
        original: Layer,
        schemes: Mapping[str, Scheme],
        windows: Windows,
    ) -> tuple[dict[str, Chosen], LayerError]:
        """Choose a layer's linears and put them in place; passes the original's states on.

        Args:
            schemes: of the linears to quantize, by name within the layer.

        Raises:
            QuantizationError: activations are not finite.
        """
        before = windows.original[windows.held].clone()
        alone = self.method.from_original
        if alone:
            found, tokens = self._from_original(original, schemes, windows)
        else:
            found, tokens = self._sequential(layer, original, schemes, windows)
            run(original, windows.original, self.device, self.pool)
        after = windows.original[windows.held]
        added = _finite_power(number, before, after)
        given = before if alone else windows.hidden[windows.held]

        def error(linears: Mapping[str, Chosen], x: Tensor = given, y: Tensor = after) -> float:
            layer.put({name: linear.weight for name, linear in linears.items()})
            square = output_error(layer, x, y, self.device)
            return math.sqrt(square / added) if added else 0.0

        plain = {n: nearest(original.weight(n).data, s, self.rule) for n, s in schemes.items()}
        rtn, chosen = error(plain), error(found)
        del plain
        if not math.isfinite(chosen):
            raise QuantizationError(
                f"layer {number} gives values that are not finite once it is quantized",
                hint="try another --calib text, or --method rtn",
            )
        if self.method.autoround and schemes:
            better = self._learned(layer, original, schemes, found, windows)
            if (learned := error(better)) < chosen:
                found, chosen = better, learned
        seen = None
        if not alone and windows.holds_out:
            count = len(after)
            seen = error(found, windows.hidden[:count], windows.original[:count])
        layer.put({name: linear.weight for name, linear in found.items()})
        return found, LayerError(number, rtn, chosen, seen, tokens)

    def _from_original(
        self, original: Layer, schemes: Mapping[str, Scheme], windows: Windows
    ) -> tuple[dict[str, Chosen], tuple[int, ...]]:
        """Scales weighted by the inputs' power in the original, whose states are passed on."""
        power = input_power(original, list(schemes), windows.original, self.device, self.pool)
        found = {}
        for name, scheme in schemes.items():
            w, seen = original.weight(name).data, power[name]
            if expert_of(name) is not None and seen.tokens < FEWEST_TOKENS:
                found[name] = nearest(w, scheme, self.rule)
            else:
                found[name] = weighted(w, scheme, self.rule, seen.mean)
        return found, tokens_of_experts({name: seen.tokens for name, seen in power.items()})

    def _learned(
        self,
        layer: Layer,
        original: Layer,
        schemes: Mapping[str, Scheme],
        found: Mapping[str, Chosen],
        windows: Windows,
    ) -> dict[str, Chosen]:
        """The linears after their rounding has been learned."""
        learned = {
            name: Learned.begin(linear, original.weight(name), schemes[name], self.device)
            for name, linear in found.items()
        }
        learn_rounding(layer, learned, windows, self.device, self.pool)
        return {name: linear.chosen() for name, linear in learned.items()}

    def _sequential(
        self,
        layer: Layer,
        original: Layer,
        schemes: Mapping[str, Scheme],
        windows: Windows,
    ) -> tuple[dict[str, Chosen], tuple[int, ...]]:
        """All linears of a layer, each put in place before those that read its output."""
        found: dict[str, Chosen] = {}
        if self.method.codes == "rtn":
            found = {n: nearest(layer.weight(n).data, s, self.rule) for n, s in schemes.items()}
            return found, ()
        window = windows.hidden[:1].to(self.device)
        common, experts = split(list(schemes))
        for names in stages(layer, window, common):
            moments = measure(layer, original, names[0], windows, self.device, self.pool)
            weights = {name: layer.weight(name).data for name in names}
            found |= self.linears(weights, schemes, *moments)
            layer.put({name: found[name].weight for name in names})
        if not experts:
            return found, ()
        chosen, tokens = choose_experts(
            layer,
            original,
            {name: schemes[name] for name in experts},
            windows,
            lambda weights, moments, held: self.linears(weights, schemes, moments, held),
            self.rule,
            self.device,
            self.pool,
        )
        return found | chosen, tokens

    def linears(
        self,
        weights: Mapping[str, Tensor],
        schemes: Mapping[str, Scheme],
        moments: Moments,
        held: Moments | None,
    ) -> dict[str, Chosen]:
        """Linears that read one input; those of one scheme are solved together.

        Args:
            weights: [N, K] float32 by name.
            schemes: by name, of these linears and maybe of others.
            held: same on windows held out; None where there are none.
        """
        with full_precision(self.device):
            factor = None
            if self.method.codes == "gptq":
                rows = torch.cat([weights[name] for name in weights])
                first = schemes[next(iter(weights))]
                factor = choose_damping(rows, first, self.rule, moments, held)
                del rows
            found: dict[str, Chosen] = {}
            for scheme in dict.fromkeys(schemes[name] for name in weights):
                names = [name for name in weights if schemes[name] == scheme]
                rows = torch.cat([weights[name] for name in names])
                sizes = [len(weights[name]) for name in names]
                chosen = self._choose(rows, scheme, moments, factor)
                codes, scales = torch.split(chosen.codes, sizes), torch.split(chosen.scale, sizes)
                found |= dict(zip(names, map(Chosen, codes, scales), strict=True))
        return {name: found[name] for name in weights}

    def _choose(self, w: Tensor, scheme: Scheme, moments: Moments, factor: Factor | None) -> Chosen:
        if factor is None:
            return weighted(w, scheme, self.rule, moments.H.diagonal())
        return gptq(w, scheme, self.rule, moments, factor)

    def head(self, model: LayeredModel, scheme: Scheme, windows: Windows) -> Chosen:
        """Choose the head in blocks of rows.

        Args:
            windows: states after the final norm.
        """
        blocks = model.weights.rows(model.head, HEAD_ROWS[self.device.type], self.device)
        if self.method.codes == "rtn":
            return _joined([nearest(rows, scheme, self.rule) for _, rows in blocks])
        moments = head_moments(windows, self.device)
        with full_precision(self.device):
            factor = factorize(moments.damped(DAMPINGS[0])) if self.method.codes == "gptq" else None
            return _joined([self._choose(rows, scheme, moments, factor) for _, rows in blocks])


def _joined(parts: Sequence[Chosen]) -> Chosen:
    codes = torch.cat([part.codes.cpu() for part in parts])
    return Chosen(codes, torch.cat([part.scale.cpu() for part in parts]))


def _finite_power(number: int, before: Tensor, after: Tensor) -> float:
    """Mean square of what a layer of the original adds to its input.

    Raises:
        QuantizationError: it is not finite.
    """
    added = float((after - before).square().mean(dtype=torch.float64))
    if not math.isfinite(added):
        raise QuantizationError(
            f"layer {number} gives values that are not finite on the calibration text",
            hint="try another --calib text; the checkpoint may be damaged",
        )
    return added
