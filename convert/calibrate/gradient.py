"""Gradients of a layer by its dequantized weights, window by window on all cores."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.original.layer import Layer
from lowbit.convert.original.threads import ordered

BETAS = (0.9, 0.99)  # of Adam


def layer_gradient(
    layer: Layer,
    names: Iterable[str],
    x: Tensor,
    above: Callable[[Tensor, slice], Tensor],
    pool: ThreadPoolExecutor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients by the layer's input and by the weights of its linears.

    Args:
        layer: any, its weights in place.
        names: of the linears.
        x: what goes in, [windows, T, h] float32.
        above: gives the gradient by the output of some windows.
        pool: of `alone_on_threads`; a window is a task.

    Returns:
        [windows, T, h], and [N, K] by name.
    """
    weights = {name: layer.weight(name) for name in names}
    for weight in weights.values():
        weight.requires_grad_(True)

    def one(part: slice) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            window = x[part].detach().requires_grad_(True)
            out = layer(window)
            inputs = (window, *weights.values())
            return torch.autograd.grad(out, inputs, above(out.detach(), part))

    parts = [slice(0, len(x))] if pool is None else [slice(i, i + 1) for i in range(len(x))]
    below = torch.empty_like(x)
    totals: list[Tensor] = []
    for part, (gradient, *by_weight) in zip(parts, ordered(pool, one, parts), strict=True):
        below[part] = gradient
        if totals:
            by_weight = [a.add_(b) for a, b in zip(totals, by_weight, strict=True)]
        totals = by_weight
    for weight in weights.values():
        weight.requires_grad_(False)
    return below, dict(zip(weights, totals, strict=True))


@dataclass(slots=True)
class Adam:
    """Adam (Kingma and Ba, arXiv 1412.6980) on one tensor; `step` changes it in place."""

    value: Tensor
    rate: float
    mean: Tensor
    square: Tensor
    steps: int = 0

    @classmethod
    def on(cls, value: Tensor, rate: float) -> "Adam":
        """Begin with running means of zero."""
        return cls(value, rate, torch.zeros_like(value), torch.zeros_like(value))

    def step(self, gradient: Tensor, left: float) -> None:
        """One update, at the share of the rate that is left."""
        self.steps += 1
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.square.lerp_(gradient * gradient, 1 - BETAS[1])
        mean = self.mean / (1 - BETAS[0] ** self.steps)
        square = self.square / (1 - BETAS[1] ** self.steps)
        self.value -= self.rate * left * mean / (square.sqrt() + 1e-20)


@dataclass(slots=True)
class GroupScaled:
    """Gradient descent with steps relative to the gradient's size in each group of weights.

    Adam without momentum and with one running mean of squares a group: next to no memory beyond
    the value itself.
    """

    value: Tensor
    rate: float
    square: Tensor
    steps: int = 0

    @classmethod
    def on(cls, value: Tensor, rate: float) -> "GroupScaled":
        """Begin; groups are along the last dimension."""
        return cls(value, rate, torch.zeros_like(value[..., :1]))

    def step(self, gradient: Tensor, left: float) -> None:
        """One update, at the share of the rate that is left."""
        self.steps += 1
        self.square.lerp_(gradient.square().mean(-1, keepdim=True), 1 - BETAS[1])
        size = (self.square / (1 - BETAS[1] ** self.steps)).sqrt_()
        self.value -= (self.rate * left) * gradient / (size + 1e-20)
