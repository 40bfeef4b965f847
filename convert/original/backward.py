"""Gradients of one decoder layer by its input and by the outputs of its linears.

A backward pass over a model that is never whole in memory takes its layers from the last to the
first. Each window runs through the layer once more, from the hidden states that the forward pass
kept, and gradients by the layer's output become gradients by its input.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.original.layer import Layer, hooked


@dataclass(frozen=True, slots=True)
class LinearTrace:
    """Input of a linear in one window, and gradients by its output."""

    x: Tensor  # [T, K]
    gradients: tuple[Tensor, ...]  # [T, N] each, one for every gradient by the layer's output


Backward = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, LinearTrace]]]


@contextmanager
def traced(layer: Layer, linears: Sequence[str]) -> Iterator[Backward]:
    """A function that runs one window through a decoder layer and its gradients back.

    Args:
        layer: whose weights need no gradients.

    Yields:
        The layer's input [T, h] float32 and gradients by its output [draws, T, h], to gradients by
        its input [draws, T, h] and the trace of every linear; experts that the window does not
        reach have none. Threads may call it at a time.
    """
    here = threading.local()

    def note(name: str, x: Tensor, output: Tensor) -> None:
        here.calls[name] = (x, output)

    def backward(hidden: Tensor, above: Tensor) -> tuple[Tensor, dict[str, LinearTrace]]:
        calls: dict[str, tuple[Tensor, Tensor]] = {}
        here.calls = calls
        with torch.enable_grad():
            window = hidden[None].detach().requires_grad_(True)
            out = layer(window)
        here.calls = {}
        reached = [name for name in linears if name in calls]
        outputs = [calls[name][1] for name in reached]
        by_draw = [
            torch.autograd.grad(out, (window, *outputs), one[None], retain_graph=True)
            for one in above
        ]
        traces = {
            name: LinearTrace(
                calls[name][0].detach().flatten(0, -2),
                tuple(gradients[number].flatten(0, -2) for gradients in by_draw),
            )
            for number, name in enumerate(reached, 1)
        }
        return torch.stack([gradients[0][0] for gradients in by_draw]), traces

    with hooked(layer.module, linears, note):
        yield backward
