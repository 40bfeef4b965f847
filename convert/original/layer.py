"""One decoder layer at a time as transformers computes it, in FP32, and what its linears see."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer with its weights, for sequences of one length."""

    module: torch.nn.Module  # transformers' own, FP32
    arguments: Mapping[str, Any]  # what the model passes to it besides the hidden states

    def __call__(self, hidden: Tensor) -> Tensor:
        """[windows, T, h] to [windows, T, h]."""
        out = self.module(hidden, **self.arguments)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def weight(self, name: str) -> torch.nn.Parameter:
        """The weight of one of its linears, [N, K]."""
        return self.module.get_parameter(f"{name}.weight")

    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Replace weights of its linears, by name."""
        for name, weight in weights.items():
            self.weight(name).data = weight


@contextmanager
def hooked(
    module: torch.nn.Module, names: Iterable[str], note: Callable[[str, Tensor, Any], object]
) -> Iterator[None]:
    """Tell of every call of some submodules, until the context closes.

    Args:
        note: called with name, first input and output, in the thread of the call.
    """

    def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...], output: Any, *, name: str) -> None:
        note(name, inputs[0], output)

    hooks = [
        module.get_submodule(name).register_forward_hook(partial(hook, name=name)) for name in names
    ]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def stages(layer: Layer, window: Tensor, linears: Sequence[str]) -> list[tuple[str, ...]]:
    """Linears that read the same tensor, in the order in which the layer calls them.

    Args:
        window: [1, T, h] hidden states.
    """
    calls: list[tuple[str, Tensor]] = []
    with torch.no_grad(), hooked(layer.module, linears, lambda name, x, _: calls.append((name, x))):
        layer(window)
    groups: list[tuple[str, ...]] = []
    last: Tensor | None = None
    for name, x in calls:
        if x is last:
            groups[-1] = (*groups[-1], name)
        else:
            groups.append((name,))
        last = x
    return groups


class _Reached(Exception):  # noqa: N818  # no error: the rest of the layer is not needed
    """Raised with the input of the linear that was reached."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@contextmanager
def probed(layer: Layer, linear: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """A function that gives what a linear is called with, without running what follows it.

    Yields:
        hidden [windows, T, h] to [windows * T, K], float32; threads may call it at a time.
    """

    def stop(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _Reached(inputs[0])

    def call(hidden: Tensor) -> Tensor:
        try:
            layer(hidden)
        except _Reached as reached:
            return reached.x.flatten(0, -2)
        raise RuntimeError("a linear was not reached")  # a bug: `stages` has seen it called

    hook = layer.module.get_submodule(linear).register_forward_pre_hook(stop)
    try:
        yield call
    finally:
        hook.remove()
