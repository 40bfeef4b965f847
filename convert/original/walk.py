"""The steps of a pass over a model that is never whole in memory: embedding, then layers."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit.convert.original.evaluation_text import WINDOW
from lowbit.convert.original.experts import recorded_routes
from lowbit.convert.original.layer import Layer
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.progress import Advance
from lowbit.convert.original.threads import Pool, for_each
from lowbit.formats.errors import CheckpointError

HEAD_ROWS = 4096  # of the vocabulary at a time
HEAD_TOKENS = {"cpu": 256, "cuda": 2048}  # a block, of which every CPU thread has one
BATCH_TOKENS = {"cpu": WINDOW, "cuda": 8192}  # through a layer at a time, for each CPU thread


def embed(model: LayeredModel, windows: Tensor, device: torch.device) -> Tensor:
    """Hidden states before the first layer: [windows, T, h] float32.

    Raises:
        CheckpointError: a token id beyond the vocabulary.
    """
    if int(windows.max()) >= model.vocabulary:
        raise CheckpointError(
            f"the tokenizer gives token {int(windows.max())}, "
            f"`{model.weights.name}` has a vocabulary of {model.vocabulary}"
        )
    flat = windows.reshape(-1).to(device)
    out = torch.empty(len(flat), model.hidden_size, device=device)
    for first, rows in model.weights.rows(model.embedding, HEAD_ROWS, device):
        here = ((flat >= first) & (flat < first + len(rows))).nonzero()[:, 0]
        out[here] = rows[flat[here] - first]
    return out.view(*windows.shape, -1)


def load_layer(model: LayeredModel, number: int, device: torch.device) -> Layer:
    """A decoder layer with its weights, in FP32."""
    module = copy.deepcopy(model.layers[number]).requires_grad_(False)
    weights = {
        name: model.weights.read(f"{model.prefix}layers.{number}.{name}", tuple(w.shape), device)
        for name, w in module.state_dict().items()
    }
    module.load_state_dict(weights, assign=True)
    return Layer(module, model.arguments[number])


def load_norm(model: LayeredModel, device: torch.device) -> Layer:
    """The final norm with its weight."""
    weight = model.weights.read(f"{model.prefix}norm.weight", (model.hidden_size,), device)
    norm = copy.deepcopy(model.norm).requires_grad_(False)
    norm.load_state_dict({"weight": weight}, assign=True)
    return Layer(norm, {})


def pass_through(layer: Layer, hidden: Tensor, pool: Pool, routes: Tensor | None = None) -> None:
    """Pass windows through a decoder layer, in place.

    Args:
        hidden: [windows, T, h], of the layer's dtype.
        routes: [windows, T, chosen], filled with the experts of every token; None without experts,
            or where nobody asks.
    """
    with recorded_routes(layer.module) as last_route:

        def run(batch: slice) -> None:
            hidden[batch] = layer(hidden[batch])
            found = None if routes is None else last_route()
            if routes is not None and found is not None:
                routes[batch] = found.view(routes[batch].shape)

        count = max(1, BATCH_TOKENS[hidden.device.type] // hidden.shape[1])
        for_each(pool, run, blocks(len(hidden), count))


def pass_through_all(
    model: LayeredModel, windows: Tensor, device: torch.device, pool: Pool, advance: Advance
) -> Tensor:
    """Hidden states after the last layer, before the final norm: [windows, T, h] float32.

    Args:
        model: loaded for windows of T tokens.
        windows: [windows, T] int64 token ids.
    """
    hidden = embed(model, windows, device)
    for number in range(len(model.layers)):
        pass_through(load_layer(model, number, device), hidden, pool)
        advance(1)
    return hidden


def blocks(total: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `total`."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
