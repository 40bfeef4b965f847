"""Codes and scales of linears that read one input, from their weights and its moments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.original.device import fine_products
from lowbit.convert.original.layer import Layer
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.threads import Pool
from lowbit.convert.original.walk import LEARNING_TOKENS, pass_through
from lowbit.convert.plan.calibration_memory import SOLVED_ROWS
from lowbit.convert.plan.method import Method
from lowbit.convert.quantize.gptq import (
    Factor,
    Projected,
    compensated_codes,
    coordinate_descent,
    factorize,
    refitted_scales,
)
from lowbit.convert.quantize.moments import Moments, head_moments
from lowbit.convert.quantize.rounding import search_on
from lowbit.convert.quantize.windows import WindowStates
from lowbit.formats.layout.packing import dequantize
from lowbit.formats.layout.rtn import ScaleRule, nearest_codes, quantize, weighted_scales
from lowbit.formats.layout.scheme import Scheme

# Shares of the mean diagonal. A layer's own error would often choose less than the first; the whole
# model's KL does not: on 75 k tokens 0.01, the GPTQ paper's value, gave .143 where 0.3 gives .078
# (Qwen2.5-Coder-0.5B), and .118 against .100 (SmolLM2-135M).
DAMPINGS = (0.3, 1.0, 3.0)
DAMPING_ROWS = 128  # of the linears, evenly spread, that each is tried on


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Codes and scales of a linear."""

    codes: Tensor  # [N, K] int8
    scale: Tensor  # [N, K/G] bfloat16

    @property
    def weight(self) -> Tensor:
        """`q * s`, [N, K] float32."""
        return dequantize(self.codes, self.scale)


def nearest(w: Tensor, scheme: Scheme, rule: ScaleRule) -> QuantizedLinear:
    """Round-to-nearest, as without calibration; w is [N, K] float32."""
    return QuantizedLinear(*quantize(w, scheme, rule, search_on(w.device, scheme)))


def weighted(w: Tensor, scheme: Scheme, rule: ScaleRule, power: Tensor) -> QuantizedLinear:
    """Round-to-nearest with scales searched by the error times the input's power, [K]."""
    scale = weighted_scales(w, scheme, rule, power, search_on(w.device, scheme))
    return QuantizedLinear(nearest_codes(w, scale, scheme), scale)


def compensated(
    w: Tensor, scheme: Scheme, rule: ScaleRule, moments: Moments, factor: Factor
) -> tuple[Tensor, Projected, QuantizedLinear]:
    """The start of `gptq`: weights to approximate, [N, K] and projected, first codes and scales."""
    target = moments.target(w, factor)
    search = search_on(w.device, scheme)
    scale = weighted_scales(target, scheme, rule, factor.importance, search)
    codes = compensated_codes(target, scale, scheme, factor)
    projected = Projected.of(target, scale.shape[1], factor)
    first = QuantizedLinear(codes, refitted_scales(projected, codes, scale, factor))
    return target, projected, first


def gptq(
    w: Tensor, scheme: Scheme, rule: ScaleRule, moments: Moments, factor: Factor
) -> QuantizedLinear:
    """Quantize the error-corrected target by GPTQ, then by coordinate descent."""
    target, projected, start = compensated(w, scheme, rule, moments, factor)
    codes = coordinate_descent(target, start.codes, start.scale, scheme, factor)
    return QuantizedLinear(codes, refitted_scales(projected, codes, start.scale, factor))


def choose_damping(
    w: Tensor, scheme: Scheme, rule: ScaleRule, moments: Moments, heldout: Moments | None
) -> Factor:
    """The factor of the moments whose damping gives the least error on the windows held out.

    What GPTQ gains is learned from the correlations of the inputs. Those of a short text are partly
    chance: codes that exploit them are better on that text and worse on any other. A larger
    diagonal trusts the correlations less. Dampings are tried from the smallest on, until the error
    grows.

    Args:
        w: [N, K] float32, weights of linears that read the input.
        scheme: of the first of them.
        heldout: moments of windows held out; None for the smallest damping.

    Raises:
        QuantizationError: the moments are not positive definite.
    """
    best = factorize(moments.damped(DAMPINGS[0]))
    if heldout is None:
        return best
    rows = w[:: -(-len(w) // DAMPING_ROWS)]

    def error(factor: Factor) -> float:
        result = compensated(rows, scheme, rule, moments, factor)[2]
        return heldout.error(rows, result.weight)

    least = error(best)
    for damping in DAMPINGS[1:]:
        factor = factorize(moments.damped(damping))
        if (result := error(factor)) >= least:
            break
        best, least = factor, result
    return best


@dataclass(frozen=True, slots=True)
class LinearQuantizer:
    """The way linears are chosen, and the place."""

    method: Method
    rule: ScaleRule  # how scales are searched
    device: torch.device
    pool: Pool  # of `alone_on_threads`

    def pass_through(self, layer: Layer, hidden: Tensor) -> None:
        """Pass all windows [windows, T, h] through a layer, in place."""
        pass_through(layer, hidden, self.device, self.pool, LEARNING_TOKENS)

    def linears(
        self,
        weights: Mapping[str, Tensor],
        schemes: Mapping[str, Scheme],
        moments: Moments,
        heldout: Moments | None,
    ) -> dict[str, QuantizedLinear]:
        """Linears that read one input; those of one scheme are solved together.

        Args:
            weights: [N, K] float32 by name.
            schemes: by name, of these linears and maybe of others.
            heldout: moments on windows held out; None where there are none.
        """
        with fine_products(self.device):
            factor = None
            if self.method.codes == "gptq":
                rows = torch.cat([weights[name] for name in weights])
                first = schemes[next(iter(weights))]
                factor = choose_damping(rows, first, self.rule, moments, heldout)
                del rows
            quantized: dict[str, QuantizedLinear] = {}
            for scheme in dict.fromkeys(schemes[name] for name in weights):
                names = [name for name in weights if schemes[name] == scheme]
                rows = torch.cat([weights[name] for name in names])
                sizes = [len(weights[name]) for name in names]
                chosen = self._choose(rows, scheme, moments, factor)
                codes, scales = torch.split(chosen.codes, sizes), torch.split(chosen.scale, sizes)
                quantized |= dict(zip(names, map(QuantizedLinear, codes, scales), strict=True))
        return {name: quantized[name] for name in weights}

    def _choose(
        self, w: Tensor, scheme: Scheme, moments: Moments, factor: Factor | None
    ) -> QuantizedLinear:
        if factor is None:
            return weighted(w, scheme, self.rule, moments.H.diagonal())
        return gptq(w, scheme, self.rule, moments, factor)

    def head(self, model: LayeredModel, scheme: Scheme, windows: WindowStates) -> QuantizedLinear:
        """Choose the head in blocks of rows.

        Args:
            windows: states after the final norm.
        """
        blocks = model.weights.rows(model.head, SOLVED_ROWS[self.device.type], self.device)
        if self.method.codes == "rtn":
            return _joined([nearest(rows, scheme, self.rule) for _, rows in blocks])
        moments = head_moments(windows, self.device)
        with fine_products(self.device):
            factor = factorize(moments.damped(DAMPINGS[0])) if self.method.codes == "gptq" else None
            return _joined([self._choose(rows, scheme, moments, factor) for _, rows in blocks])


def _joined(parts: Sequence[QuantizedLinear]) -> QuantizedLinear:
    codes = torch.cat([part.codes.cpu() for part in parts])
    return QuantizedLinear(codes, torch.cat([part.scale.cpu() for part in parts]))
