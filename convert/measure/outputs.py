"""Output error of linears: the packed weights on the inputs that the original's get."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lowbit.convert.original.layer import hooked

Call = tuple[Tensor, Tensor]  # input, output
Squares = tuple[float, float]  # of the error, of the output


@contextmanager
def recorded_linears(layer: torch.nn.Module) -> Iterator[dict[str, list[Call]]]:
    """Record the inputs and outputs of every linear of a layer, by name, until the context closes.

    Inputs that linears share are held once.
    """
    linears = [n for n, module in layer.named_modules() if isinstance(module, torch.nn.Linear)]
    calls: dict[str, list[Call]] = {name: [] for name in linears}
    with hooked(layer, linears, lambda name, x, output: calls[name].append((x, output))):
        yield calls


def squares(linear: torch.nn.Module, calls: Iterable[Call]) -> list[Squares]:
    """|x P^T - y|^2 and |y|^2 of the original linear's calls, with P the weights of this one."""
    return [(_square(linear(x) - y), _square(y)) for x, y in calls]


def output_error(found: Sequence[Squares]) -> float:
    """|x P^T - y| / |y| over all calls, of one linear or of several."""
    # Threads record calls in any order, and fsum gives one sum for all orders.
    error, norm = (math.fsum(column) for column in zip(*found, strict=True))
    if norm == 0:
        return 0.0 if error == 0 else math.inf
    return math.sqrt(error / norm)


def _square(x: Tensor) -> float:
    """Sum of squares: FP32 within a row, FP64 over rows."""
    return float(torch.linalg.vecdot(x, x).sum(dtype=torch.float64))
