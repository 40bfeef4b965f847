"""Weights of what follows attention in a layer: one MLP, or experts that a router chooses from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

W = TypeVar("W", covariant=True)  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class MlpWeights(Generic[W]):
    """A gated MLP of width I.

    Attributes:
        gate_up: [2 * I, h], gate rows first.
        down: [h, I].
    """

    gate_up: W
    down: W


@dataclass(frozen=True, slots=True)
class ExpertWeights(Generic[W]):
    """A mixture of E experts of width I; every token passes through some of them.

    Linears of experts have one shape and one scheme, so that a backend may keep them in one buffer,
    [E, 2 * I, h] and [E, h, I]. An item of the sequence is one expert's.

    Attributes:
        router: [E, h]; with a shared expert [E + 1, h], the last row is that expert's gate.
        gate_up: E of [2 * I, h], gate rows first, and then that of the shared expert.
        down: E of [h, I], and then that of the shared expert.
        chosen: experts of a token.
        shared: the last expert is one that all tokens pass through, which may have another width
            and another scheme.
    """

    router: Tensor
    gate_up: Sequence[W]
    down: Sequence[W]
    chosen: int
    shared: bool
