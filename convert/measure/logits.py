"""Logits of the original and of its packed form on windows of text, block by block.

transformers' own modules compute in FP32 (on some GPUs by products of BF16 parts, see `products`;
noise as large as their rounding adds 5e-7 to SmolLM2-135M's KL), but the model never exists whole:
it is built without storage, and a decoder layer gets its weights only while all windows pass
through it. Then the next layer. Two sets of hidden states are kept, the original's and the packed
model's. A third one is the packed model's with inputs in eight bits, where they are asked for; a
shorter one is the original's in BF16, where BF16's own noise is.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.measure.metrics import LogitSums, TokenFigures
from lowbit.convert.measure.rounded_inputs import input_groups, rounded_inputs
from lowbit.convert.measure.routing import Routes, Routing, RoutingSums
from lowbit.convert.original.device import fine_products
from lowbit.convert.original.experts import recorded_routes
from lowbit.convert.original.layer import Layer, hooked
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.progress import Advance
from lowbit.convert.original.threads import Pool, alone_on_threads, for_each
from lowbit.convert.original.walk import (
    HEAD_ROWS,
    HEAD_TOKENS,
    SUM_TOKENS,
    blocks,
    embed,
    layers_ahead,
    passing,
    scored_states,
)
from lowbit.formats.activation_modes import Activations
from lowbit.formats.architectures.names import any_expert
from lowbit.formats.errors import CheckpointError
from lowbit.formats.layout.manifest import is_rotated, read_manifest

Models = tuple[LayeredModel, LayeredModel]  # original and packed
Call = tuple[Tensor, Tensor]  # input, output
Squares = tuple[float, float]  # of the error, of the output


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of a pass."""

    figures: TokenFigures  # of the packed model against the original
    # Figures of the original in BF16 against itself; None where no window was asked for
    noise: TokenFigures | None
    # Figures of the packed model with inputs in eight bits; None where they were not asked for
    int8: TokenFigures | None
    # Relative, of the packed linears in decoder layers, by module, or by all experts of a layer;
    # empty where no window was asked for
    output_errors: Mapping[str, float]
    # [windows, T - 1, h] inputs of both heads on the windows asked for, original first
    states: tuple[Tensor, Tensor]
    routing: Routing | None  # of tokens to experts in both models; None without experts


def compare(
    models: Models,
    windows: Tensor,
    device: torch.device,
    advance: Advance,
    noisy: int = 0,
    watched: int = 0,
    drafted: Sequence[int] = (),
    activations: Activations = "exact",
) -> Comparison:
    """Per-token figures of the packed model against the original.

    Args:
        models: original and packed, loaded for windows of T tokens.
        windows: [windows, T] int64 token ids.
        advance: told of weights times tokens done, `work` in all.
        noisy: windows, from the first, that also pass through the original in BF16.
        watched: windows, from the first, on which outputs of linears are compared.
        drafted: numbers of the windows whose final states are returned.
        activations: `int8` compares the packed model with inputs in eight bits, too.
    """
    original, packed = models
    schemes = packed.weights.packed_schemes()
    rotated = is_rotated(read_manifest(packed.weights.checkpoint.folder))
    errors: dict[str, list[Squares]] = {}
    routing = RoutingSums(original.weights.checkpoint.config)
    with (
        alone_on_threads(device) as pool,
        fine_products(device),
        layers_ahead(models, device) as layers,
    ):
        hidden = [embed(model, windows, device) for model in models]
        hidden += [hidden[1].clone()] if activations == "int8" else []
        rounded = hidden[0][:noisy].to(torch.bfloat16)
        for number in range(len(original.layers)):
            routes = routing.new(windows, noisy)
            calls = _original_layer(next(layers), hidden[0], rounded, watched, pool, routes)
            layer = next(layers)
            for name in calls:
                module = f"{packed.prefix}layers.{number}.{name}"
                if module in schemes and calls[name]:
                    found = squares(layer.module.get_submodule(name), calls[name])
                    errors.setdefault(any_expert(module), []).extend(found)
            calls.clear()
            _pass(layer, hidden[1], pool, routes.packed)
            for states in hidden[2:]:
                with rounded_inputs(layer.module, input_groups(packed, number, rotated)):
                    _pass(layer, states, pool, None)
            routing.add(routes)
            tokens = len(hidden) * windows.numel() + windows[:noisy].numel()
            advance(_weights(layer.module) * tokens)
            del layer  # or it is there beside the next two
        compared = _compare_heads(models, windows, hidden, rounded, pool, advance)
    count, T = windows.shape
    a, b = (states.view(count, T - 1, -1)[list(drafted)] for states in hidden[:2])
    outputs = {module: output_error(found) for module, found in errors.items()}
    return Comparison(*compared, outputs, (a, b), routing.finish())


def work(
    model: LayeredModel, windows: Tensor, noisy: int = 0, activations: Activations = "exact"
) -> int:
    """Total work that `compare` reports as progress, in weights times tokens."""
    layers = sum(_weights(layer) for layer in model.layers)
    weights = layers + model.vocabulary * model.hidden_size
    sets = 3 if activations == "int8" else 2
    return weights * (sets * windows.numel() + windows[:noisy].numel())


def _original_layer(
    layer: Layer,
    hidden: Tensor,
    rounded: Tensor,
    watched: int,
    pool: Pool,
    routes: Routes,
) -> dict[str, list[Call]]:
    """Pass all windows through a layer of the original; what its linears saw of those watched."""
    first, rest = routes.cut(watched)
    with recorded_linears(layer.module) as calls:
        _pass(layer, hidden[:watched], pool, first)
    _pass(layer, hidden[watched:], pool, rest)
    if len(rounded):
        layer = Layer(layer.module.to(torch.bfloat16), _rounded(layer.arguments))
        _pass(layer, rounded, pool, routes.rounded)
    return calls


def _pass(layer: Layer, hidden: Tensor, pool: Pool, routes: Tensor | None) -> None:
    """Pass windows through a layer, in place, and fill in the experts of every token, if any."""
    with recorded_routes(layer.module) as last_route:
        for part, chosen in passing(layer, hidden, hidden.device, pool, last_route):
            if routes is not None and chosen is not None:
                routes[part] = chosen.view(routes[part].shape)


def _compare_heads(
    models: Models,
    windows: Tensor,
    hidden: list[Tensor],
    rounded: Tensor,
    pool: Pool,
    advance: Advance,
) -> tuple[TokenFigures, TokenFigures | None, TokenFigures | None]:
    """Figures of the packed model, of the original in BF16, and with inputs in eight bits."""
    for index, model in enumerate((*models, models[1])[: len(hidden)]):
        hidden[index] = scored_states(model, hidden[index])  # not all sets twice
    a, c = hidden[0], scored_states(models[0], rounded)
    device = a.device
    labels = windows[:, 1:].reshape(-1).to(device)
    sums, noise = [LogitSums(labels) for _ in hidden[1:]], LogitSums(labels[: len(c)])
    for first, head_a, head_b in _head_blocks(models, device):
        for own, states in zip(sums, hidden[1:], strict=True):
            add = partial(_add_logits, own, first, (a, states), (head_a, head_b))
            for_each(pool, add, blocks(len(labels), HEAD_TOKENS[device.type]))
        add = partial(_add_logits, noise, first, (a, c), (head_a, head_a.to(torch.bfloat16)))
        for_each(pool, add, blocks(len(c), HEAD_TOKENS[device.type]))
        advance(head_a.numel() * (len(hidden) * windows.numel() + rounded.shape[:2].numel()))
    packed, *int8 = (each.finish() for each in sums)
    return packed, noise.finish() if len(c) else None, int8[0] if int8 else None


def _add_logits(
    sums: LogitSums,
    first_row: int,
    states: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    tokens: slice,
) -> None:
    a, b = (x[tokens] @ weight.T for x, weight in zip(states, rows, strict=True))
    for part in blocks(len(a), SUM_TOKENS[a.device.type]):
        here = slice(tokens.start + part.start, tokens.start + part.stop)
        sums.add(here, first_row, a[part], b[part])


def _head_blocks(models: Models, device: torch.device) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Rows of both heads, block by block: number of the first, [rows, h] float32 twice."""
    expected = (models[0].vocabulary, models[0].hidden_size)
    for model in models:
        shape = model.weights.shape(model.head)
        if shape != expected:
            raise CheckpointError(
                f"`{model.weights.name}`: `{model.head}` has shape {list(shape)}, "
                f"expected {list(expected)}"
            )
    streams = (model.weights.rows(model.head, HEAD_ROWS, device) for model in models)
    for (first, a), (_, b) in zip(*streams, strict=True):
        yield first, a, b


def _weights(layer: torch.nn.Module) -> int:
    return sum(p.numel() for p in layer.parameters())


def _rounded(value: Any) -> Any:
    """Arguments of a layer as a model in BF16 passes them."""
    if isinstance(value, Tensor):
        return value.to(torch.bfloat16) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_rounded(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return value


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


def output_error(squares: Sequence[Squares]) -> float:
    """|x P^T - y| / |y| over all calls, of one linear or of several."""
    # Threads record calls in any order, and fsum gives one sum for all orders.
    error, norm = (math.fsum(column) for column in zip(*squares, strict=True))
    if norm == 0:
        return 0.0 if error == 0 else math.inf
    return math.sqrt(error / norm)


def _square(x: Tensor) -> float:
    """Sum of squares: FP32 within a row, FP64 over rows."""
    return float(torch.linalg.vecdot(x, x).sum(dtype=torch.float64))
