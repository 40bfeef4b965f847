"""Experts of a mixture as modules of their own, and the routes that tokens take.

transformers holds the experts of a layer in two tensors. Here every expert is three linears, under
the names that files have, so that what loads, records or replaces linears needs to know of none.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.original.layer import hooked

FUSED = "gate_up_proj"  # by which transformers' module of all experts is known
ROUTER, EXPERTS = "gate", "experts"  # siblings in a layer's MLP


class Expert(torch.nn.Module):
    """One expert: down(act(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, activation: Callable[[Tensor], Tensor]) -> None:
        """Make linears with the current default device and dtype."""
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden, inner, bias=False)
        self.up_proj = torch.nn.Linear(hidden, inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, hidden, bias=False)
        self.activation = activation

    def inner(self, x: Tensor) -> Tensor:
        """Input of the down projection: [tokens, h] to [tokens, I]."""
        out: Tensor = self.activation(self.gate_proj(x)) * self.up_proj(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, h] to [tokens, h]."""
        out: Tensor = self.down_proj(self.inner(x))
        return out


class Experts(torch.nn.ModuleList):
    """All experts of a layer, called like transformers' own module."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the experts that each token is routed to.

        Args:
            hidden_states: [tokens, h].
            top_k_index: [tokens, chosen] int64.
            top_k_weights: [tokens, chosen].
        """
        out = torch.zeros_like(hidden_states)
        for number in torch.unique(top_k_index).tolist():
            tokens, ranks = (top_k_index == number).nonzero(as_tuple=True)
            y = self[number](hidden_states[tokens]) * top_k_weights[tokens, ranks, None]
            out.index_add_(0, tokens, y.to(out.dtype))
        return out


def separate_experts(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Replace every module of fused experts; both have no storage."""
    for parent in list(model.modules()):
        fused: Any = getattr(parent, EXPERTS, None)
        if not isinstance(getattr(fused, FUSED, None), torch.nn.Parameter):
            continue
        count, rows, hidden = fused.gate_up_proj.shape
        with torch.device("meta"):
            experts = (Expert(hidden, rows // 2, fused.act_fn) for _ in range(count))
            setattr(parent, EXPERTS, Experts(experts).to(dtype).eval())


@contextmanager
def recorded_routes(layer: torch.nn.Module) -> Iterator[Callable[[], Tensor | None]]:
    """A function that gives the experts chosen in the last call by its thread.

    Yields:
        () to [tokens, chosen] int64; None in a layer without a router.
    """
    here = threading.local()

    def note(_: str, __: Tensor, output: tuple[Tensor, Tensor, Tensor]) -> None:
        here.chosen = output[2]

    mlp = getattr(layer, "mlp", None)
    names = [f"mlp.{ROUTER}"] if hasattr(mlp, EXPERTS) and hasattr(mlp, ROUTER) else []
    with hooked(layer, names, note):
        yield lambda: getattr(here, "chosen", None)
