"""Second moments of what a linear sees, and the weights that would best make up for earlier errors.

X [tokens, K] is the linear's input in the quantized model so far, X~ the one in the original. With
H = E[x x^T] and C = E[x~ x^T], the weights that reproduce the original's output from X best in the
mean square are W C H^-1; plain GPTQ takes W itself, which reproduces what the linear would have
made of wrong input (asymmetric calibration: Li et al., GPTAQ, arXiv 2504.02692).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.original.layer import Layer, hooked, probed
from lowbit.convert.original.threads import Pool, ordered
from lowbit.convert.original.walk import LEARNING_TOKENS, batches, passing
from lowbit.convert.plan.calibration_memory import products_at_a_time
from lowbit.convert.quantize.gptq import Factor
from lowbit.convert.quantize.windows import WindowStates
from lowbit.formats.errors import QuantizationError

LEAST_POWER = 1e-30  # of a token, so that nothing is divided by zero
LOUD_TOKENS = 2048  # that are compared to tell which are loud


@dataclass(frozen=True, slots=True)
class Moments:
    """Second moments of the input that some linears share, means over the calibration tokens."""

    H: Tensor  # E[x x^T], [K, K] float32
    C: Tensor  # E[x~ x^T], [K, K] float32; H where nothing before has changed

    def damped(self, damping: float) -> Tensor:
        """H with a larger diagonal: [K, K], positive definite even where inputs are dependent.

        Args:
            damping: share of the mean diagonal that is added to each element of the diagonal.
        """
        H = self.H.clone()
        diagonal = H.diagonal()
        mean = diagonal.mean()
        diagonal += damping * torch.where(mean > 0, mean, 1.0)  # no input at all: any codes do
        return H

    def error(self, w: Tensor, rounded: Tensor) -> float:
        """Mean square of the output's error, less a constant that does not depend on `rounded`.

        Args:
            w: [N, K] float32, the original's weights.
            rounded: [N, K] float32, those that take their place.
        """
        return float(((rounded @ self.H - 2 * (w @ self.C)) * rounded).sum(dtype=torch.float64))

    def target(self, w: Tensor, factor: Factor) -> Tensor:
        """Weights that give the original's output from the quantized model's input: [N, K] float32.

        Args:
            w: [N, K] float32, the original's.
        """
        return w if self.C is self.H else w + factor.solve(w @ (self.C - self.H))


def measure(
    layer: Layer,
    original: Layer,
    linear: str,
    windows: WindowStates,
    device: torch.device,
    pool: Pool,
) -> tuple[Moments, Moments | None]:
    """The moments of one linear's input over the windows to learn from, and over those held out.

    Args:
        layer: quantized as far as the linear's inputs come from it.

    Returns:
        The second is None where no window is held out.

    Raises:
        QuantizationError: activations are not finite.
    """
    K = layer.weight(linear).shape[1]
    unchanged = layer is original and windows.hidden is windows.original

    def over(part: slice) -> Moments:
        hidden, original = windows.hidden[part], windows.original[part]
        T = hidden.shape[1]
        compared = max(1, LOUD_TOKENS // T) * T  # whole windows, the same ones on every device

        def inputs(batch: slice) -> tuple[Tensor, ...]:
            y = there(original[batch].to(device))
            factors = token_norm_caps(y, compared)
            if unchanged:
                return (y * factors,)
            return here(hidden[batch].to(device)) * factors, y * factors

        parts, sets = batches(hidden, device, LEARNING_TOKENS), 1 if unchanged else 2
        sums = _sums(inputs, parts, sets, K, device, pool)
        return _means(sums, linear, hidden.shape[0] * hidden.shape[1])

    with probed(layer, linear) as here, probed(original, linear) as there:
        learned = over(slice(0, windows.learned))
        return learned, over(windows.heldout) if windows.holds_out else None


def token_norm_caps(x: Tensor, compared: int) -> Tensor:
    """Factors that make no token louder than the median token around it, [tokens, 1].

    A few tokens, often the first of a window, have activations a thousand times those of others
    (Sun et al., Massive Activations, arXiv 2402.17762) and would decide all codes. The model hardly
    looks at their exact values: on Qwen2.5-Coder-0.5B this lowers the KL from .078 to .060.

    Args:
        x: [tokens, K] inputs of a linear in the original.
        compared: tokens that share a median, counted from the first.
    """
    return torch.cat([_caps(part) for part in torch.split(x, compared)])


def _caps(x: Tensor) -> Tensor:
    power = x.square().sum(-1, keepdim=True)
    # No shape follows from values, which a GPU would wait for.
    median = torch.where(power > 0, power, torch.nan).nanmedian()
    factors = (median / power.clamp(min=LEAST_POWER)).clamp(max=1).sqrt()
    return torch.where(median.isnan(), 1.0, factors)


def paired(x: Tensor, y: Tensor, linear: str) -> Moments:
    """Moments of inputs that are at hand.

    Args:
        x: [tokens, K] float32, in the model quantized so far.
        y: the same tokens in the original.

    Raises:
        QuantizationError: activations are not finite.
    """
    factors = token_norm_caps(y, len(y))
    x, y = x * factors, y * factors
    return _means((x.T @ x, y.T @ x), linear, len(x))


def head_moments(windows: WindowStates, device: torch.device) -> Moments:
    """The moments of what the head sees: the windows' states after the final norm."""
    sets = [states[: windows.learned] for states in windows.sets()]

    def inputs(part: slice) -> tuple[Tensor, ...]:
        return tuple(states[part].to(device).flatten(0, -2) for states in sets)

    hidden = sets[0]
    parts = batches(hidden, device, LEARNING_TOKENS)
    sums = _sums(inputs, parts, len(sets), hidden.shape[-1], device, None)
    return _means(sums, "lm_head", hidden.shape[0] * hidden.shape[1])


def _sums(
    inputs: Callable[[slice], tuple[Tensor, ...]],
    parts: list[slice],
    sets: int,
    K: int,
    device: torch.device,
    pool: Pool,
) -> tuple[Tensor, ...]:
    """Sums over batches, added in their order: of x x^T, and of x~ x^T where there are two sets.

    Args:
        inputs: x of a batch, and x~.
    """
    sums = torch.zeros(sets, K, K, device=device).unbind()
    if pool is None:
        with torch.no_grad():
            for part in parts:
                given = inputs(part)
                for total, each in zip(sums, given, strict=True):
                    total.addmm_(each.T, given[0])
        return sums

    def products(part: slice) -> list[Tensor]:
        given = inputs(part)
        return [each.T @ given[0] for each in given]

    limit = products_at_a_time(K, sets, torch.get_num_threads())
    for made in ordered(pool, products, parts, limit):
        for total, each in zip(sums, made, strict=True):
            total += each
    return sums


def _means(sums: Sequence[Tensor], linear: str, tokens: int) -> Moments:
    """Moments from the sum of x x^T, and that of x~ x^T where it is another."""
    for total in sums:
        _check_finite(total, linear)
    means = [total.div_(tokens) for total in sums]
    return Moments(means[0], means[-1])


def _check_finite(total: Tensor, linear: str) -> None:
    if not bool(total.isfinite().all()):
        raise QuantizationError(
            f"`{linear}` sees values that are not finite on the calibration text",
            hint="try another --calib text; the checkpoint may be damaged",
        )


@dataclass(frozen=True, slots=True)
class Power:
    """Power of a linear's input."""

    mean: Tensor  # mean square of each channel, [K] float32
    tokens: int  # over which it is taken


def input_power(
    layer: Layer,
    linears: Sequence[str],
    hidden: Tensor,
    device: torch.device,
    pool: Pool,
) -> dict[str, Power]:
    """Power of the inputs of some linears, by name; zero where no token reaches one.

    Passes all windows through the layer, in place.

    Args:
        hidden: before the layer, [windows, T, h] float32.

    Raises:
        QuantizationError: activations are not finite.
    """
    totals = {name: torch.zeros(layer.weight(name).shape[1], device=device) for name in linears}
    tokens = dict.fromkeys(linears, 0)
    here = threading.local()

    def note(name: str, x: Tensor, _: Tensor) -> None:  # not called of an expert without tokens
        vars(here)[name] = _power(x)

    def collect() -> dict[str, tuple[Tensor, int]]:
        squares = dict(vars(here))
        vars(here).clear()
        return squares

    with hooked(layer.module, linears, note):
        for _, squares in passing(layer, hidden, device, pool, collect, LEARNING_TOKENS):
            for name, (square, count) in squares.items():
                totals[name] += square
                tokens[name] += count
    for name, total in totals.items():
        _check_finite(total, name)
    return {n: Power(total / max(1, tokens[n]), tokens[n]) for n, total in totals.items()}


def _power(x: Tensor) -> tuple[Tensor, int]:
    """Sum of the squares of each channel of an input [..., K], and its tokens."""
    flat = x.flatten(0, -2)
    return flat.square().sum(0), len(flat)
