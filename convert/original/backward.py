"""Gradients of one decoder layer by its input and by the outputs of its linears.

A backward pass over a model that is never whole in memory takes its layers from the last to the
first. Each window runs through the layer once more, from the hidden states that the forward pass
kept, and gradients by the layer's output become gradients by its input.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearTrace:
    """Input of a linear in one window, and gradients by its output.

    Attributes:
        x: [T, K].
        gradients: [T, N] each, one for every gradient by the layer's output.
    """

    x: Tensor
    gradients: tuple[Tensor, ...]


class TracedLayer:
    """A decoder layer whose linears record inputs and outputs, apart in every thread."""

    def __init__(
        self, layer: torch.nn.Module, arguments: Mapping[str, Any], linears: Sequence[str]
    ) -> None:
        """Watch some linears; `close` when done.

        Args:
            layer: with its weights, which need no gradients.
            arguments: keyword arguments of its call besides the hidden states.
            linears: names of submodules.
        """
        self._layer, self._arguments, self._linears = layer, arguments, tuple(linears)
        self._thread = threading.local()
        self._hooks = [
            layer.get_submodule(name).register_forward_hook(
                lambda _, inputs, output, name=name: self._record(name, inputs[0], output)
            )
            for name in linears
        ]

    def _record(self, name: str, x: Tensor, output: Tensor) -> None:
        self._thread.calls[name] = (x, output)

    def close(self) -> None:
        """Stop recording."""
        for hook in self._hooks:
            hook.remove()

    def backward(self, hidden: Tensor, above: Tensor) -> tuple[Tensor, dict[str, LinearTrace]]:
        """Run one window through the layer and its gradients back.

        Args:
            hidden: [T, h] float32, input of the layer.
            above: [draws, T, h], gradients by its output.

        Returns:
            [draws, T, h], gradients by its input, and the trace of every linear; experts that the
            window does not reach have none.
        """
        calls: dict[str, tuple[Tensor, Tensor]] = {}
        self._thread.calls = calls
        with torch.enable_grad():
            window = hidden[None].detach().requires_grad_(True)
            out = self._layer(window, **self._arguments)
        reached = [name for name in self._linears if name in calls]
        outputs = [calls[name][1] for name in reached]
        by_draw = [
            torch.autograd.grad(out, (window, *outputs), one[None], retain_graph=True)
            for one in above
        ]
        self._thread.calls = {}
        traces = {
            name: LinearTrace(
                calls[name][0].detach().flatten(0, -2),
                tuple(found[number].flatten(0, -2) for found in by_draw),
            )
            for number, name in enumerate(reached, 1)
        }
        return torch.stack([found[0][0] for found in by_draw]), traces


@contextmanager
def traced(
    layer: torch.nn.Module, arguments: Mapping[str, Any], linears: Sequence[str]
) -> Iterator[TracedLayer]:
    """A `TracedLayer` that records while the context is open."""
    found = TracedLayer(layer, arguments, linears)
    try:
        yield found
    finally:
        found.close()
