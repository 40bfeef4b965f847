"""Codes and scales of one linear, from its weights and the moments of its input."""

from dataclasses import dataclass

from torch import Tensor

from lowbit.convert.calibrate.gptq import (
    Factor,
    compensated_codes,
    polished_codes,
    refitted_scales,
)
from lowbit.convert.calibrate.moments import Moments
from lowbit.convert.plan.search import search_on
from lowbit.formats.layout.packing import dequantize
from lowbit.formats.layout.rtn import ScaleRule, nearest_codes, quantize, weighted_scales
from lowbit.formats.layout.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Chosen:
    """Codes and scales of a linear.

    Attributes:
        codes: [N, K] int8.
        scale: [N, K/G] bfloat16.
    """

    codes: Tensor
    scale: Tensor

    @property
    def weight(self) -> Tensor:
        """`q * s`, [N, K] float32."""
        return dequantize(self.codes, self.scale)


def nearest(w: Tensor, scheme: Scheme, rule: ScaleRule) -> Chosen:
    """Round-to-nearest, as without calibration; w is [N, K] float32."""
    return Chosen(*quantize(w, scheme, rule, search_on(w.device, scheme)))


def weighted(w: Tensor, scheme: Scheme, rule: ScaleRule, power: Tensor) -> Chosen:
    """Round-to-nearest with scales searched by the error times the input's power, [K]."""
    scale = weighted_scales(w, scheme, rule, power, search_on(w.device, scheme))
    return Chosen(nearest_codes(w, scale, scheme), scale)


def compensated(
    w: Tensor, scheme: Scheme, rule: ScaleRule, moments: Moments, factor: Factor
) -> tuple[Tensor, Chosen]:
    """The start of `gptq`: the weights to approximate, [N, K], and first codes and scales."""
    target = moments.target(w, factor)
    search = search_on(w.device, scheme)
    scale = weighted_scales(target, scheme, rule, factor.importance, search)
    codes = compensated_codes(target, scale, scheme, factor)
    return target, Chosen(codes, refitted_scales(target, codes, scale, factor))


def gptq(w: Tensor, scheme: Scheme, rule: ScaleRule, moments: Moments, factor: Factor) -> Chosen:
    """Compensated codes of what makes up for the errors before, polished."""
    target, found = compensated(w, scheme, rule, moments, factor)
    codes = polished_codes(target, found.codes, found.scale, scheme, factor)
    return Chosen(codes, refitted_scales(target, codes, found.scale, factor))
