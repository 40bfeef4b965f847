"""Second moments of what a linear sees, and the weights that would best make up for earlier errors.

X [tokens, K] is the linear's input in the quantized model so far, X~ the one in the original. With
H = E[x x^T] and C = E[x~ x^T], the weights that reproduce the original's output from X best in the
mean square are W C H^-1; plain GPTQ takes W itself, which reproduces what the linear would have
made of wrong input (asymmetric calibration: Li et al., GPTAQ, arXiv 2504.02692).
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.calibrate.gptq import Factor
from lowbit.convert.original.layer import Layer, Probe, batches
from lowbit.convert.original.threads import ordered
from lowbit.formats.errors import QuantizationError

PRODUCTS_BYTES = 4 << 30  # of batches' moments that exist at a time
DAMPING = 0.01  # of H's mean diagonal, added to its diagonal; the value of the GPTQ paper


@dataclass(frozen=True, slots=True)
class Moments:
    """Means over the calibration tokens of what some linears read.

    Attributes:
        H: E[x x^T], [K, K] float32.
        C: E[x~ x^T], [K, K] float32; H where nothing before has changed.
    """

    H: Tensor
    C: Tensor

    @property
    def damped(self) -> Tensor:
        """H with a larger diagonal: [K, K], positive definite even where inputs are dependent."""
        H = self.H.clone()
        diagonal = H.diagonal()
        mean = diagonal.mean()
        diagonal += DAMPING * torch.where(mean > 0, mean, 1.0)  # no input at all: any codes do
        return H

    def target(self, w: Tensor, factor: Factor) -> Tensor:
        """Weights that give the original's output from the quantized model's input.

        Args:
            w: [N, K] float32, the original's.
            factor: of `damped`.

        Returns:
            [N, K] float32.
        """
        return w + factor.solve(w @ (self.C - self.H))


def measure(
    layer: Layer,
    original: Layer,
    linear: str,
    hidden: tuple[Tensor, Tensor],
    device: torch.device,
    pool: ThreadPoolExecutor | None,
) -> Moments:
    """The moments of one linear's input.

    Args:
        layer: quantized as far as the linear's inputs come from it.
        original: the same layer as it was.
        linear: name within the layer.
        hidden: what goes into the layer and into the original, [windows, T, h] float32 each.
        device: where to compute.
        pool: of `alone_on_threads`.

    Raises:
        QuantizationError: activations are not finite.
    """
    here, there = Probe(layer, linear), Probe(original, linear)

    def products(part: slice) -> tuple[Tensor, Tensor]:
        x, y = here(hidden[0][part].to(device)), there(hidden[1][part].to(device))
        return x.T @ x, y.T @ x

    try:
        sums: tuple[Tensor, Tensor] | None = None
        K = layer.weight(linear).shape[1]
        limit = max(1, PRODUCTS_BYTES // (2 * K * K * 4))
        for H, C in ordered(pool, products, batches(hidden[0], device), limit):
            sums = (H, C) if sums is None else (sums[0].add_(H), sums[1].add_(C))
    finally:
        here.close()
        there.close()
    return _means(sums, linear, hidden[0])


def head_moments(states: Tensor, original_states: Tensor, device: torch.device) -> Moments:
    """The moments of what the head sees: the final norm's output, [windows, T, h] each."""
    sums: tuple[Tensor, Tensor] | None = None
    for part in batches(states, device):
        x, y = (side[part].to(device).flatten(0, -2) for side in (states, original_states))
        H, C = x.T @ x, y.T @ x
        sums = (H, C) if sums is None else (sums[0].add_(H), sums[1].add_(C))
    return _means(sums, "lm_head", states)


def _means(sums: tuple[Tensor, Tensor] | None, linear: str, hidden: Tensor) -> Moments:
    tokens = hidden.shape[0] * hidden.shape[1]
    if sums is None or not all(total.isfinite().all() for total in sums):
        raise QuantizationError(
            f"`{linear}` sees values that are not finite on the calibration text",
            hint="try another --calib text; the checkpoint may be damaged",
        )
    return Moments(sums[0] / tokens, sums[1] / tokens)
