"""Routes of tokens through the experts of the original and of the packed model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.formats.architectures import read_config

NO_ROUTE = -1


@dataclass(frozen=True, slots=True)
class Routing:
    """Routes of tokens to experts in the packed model, against the original's."""

    experts: int  # of a layer
    chosen: int  # experts that each token passes through
    tokens: int  # compared in every layer
    same_set: float  # share of tokens, over all layers, that are routed to the same set of experts
    same_experts: float  # share of the chosen experts that are in both sets
    # `same_set` of the original in BF16; None where it was not measured
    same_set_bf16: float | None
    by_layer: tuple[float, ...]  # `same_set` of every layer


class Routes(NamedTuple):
    """Experts of every token in one layer, [windows, T, chosen] int16; None without experts.

    `rounded` has those in the original in BF16, on the first windows.
    """

    original: Tensor | None
    packed: Tensor | None
    rounded: Tensor | None

    def cut(self, count: int) -> tuple[Tensor | None, Tensor | None]:
        """The original's routes in the first windows and in the others, to be filled."""
        if self.original is None:
            return None, None
        return self.original[:count], self.original[count:]


class RoutingSums:
    """Shares of tokens that keep their experts, collected layer by layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Begin for a model with this config.json."""
        self._experts = read_config(config).experts
        self._layers: list[tuple[float, float]] = []
        self._rounded: list[float] = []
        self._tokens = 0

    def new(self, windows: Tensor, noisy: int) -> Routes:
        """Places for the routes in a layer.

        Args:
            windows: [windows, T] token ids.
            noisy: windows, from the first, that also pass through the original in BF16.
        """
        if self._experts is None:
            return Routes(None, None, None)
        shape = (*windows.shape, self._experts.chosen)
        original, packed = (torch.full(shape, NO_ROUTE, dtype=torch.int16) for _ in range(2))
        return Routes(original, packed, torch.full_like(original[:noisy], NO_ROUTE))

    def add(self, routes: Routes) -> None:
        """Compare the routes in a layer."""
        if routes.original is None or routes.packed is None or routes.rounded is None:
            return
        same, kept = shares(routes.original, routes.packed)
        self._layers.append((same, kept))
        self._tokens = routes.original[..., 0].numel()
        if len(routes.rounded):
            original = routes.original[: len(routes.rounded)]
            self._rounded.append(shares(original, routes.rounded)[0])

    def finish(self) -> Routing | None:
        """Figures over all layers; None without experts."""
        if self._experts is None:
            return None
        count = len(self._layers)
        return Routing(
            experts=self._experts.count,
            chosen=self._experts.chosen,
            tokens=self._tokens,
            same_set=sum(same for same, _ in self._layers) / count,
            same_experts=sum(kept for _, kept in self._layers) / count,
            same_set_bf16=sum(self._rounded) / count if self._rounded else None,
            by_layer=tuple(same for same, _ in self._layers),
        )


def shares(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Shares of tokens with the same set of experts, and of experts that are in both sets.

    Args:
        a: [..., chosen] numbers of experts, in any order, each once.
        b: the same of the other model.
    """
    kept = (a[..., :, None] == b[..., None, :]).any(-1)
    return float(kept.all(-1).double().mean()), float(kept.double().mean())
