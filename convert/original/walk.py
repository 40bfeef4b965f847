"""The steps of a pass over a model that is never whole in memory: embedding, then layers."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from lowbit.convert.original.layer import Layer
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.progress import Advance
from lowbit.convert.original.threads import Pool, ordered
from lowbit.formats.errors import CheckpointError

HEAD_ROWS = 4096  # of the vocabulary at a time
COST_ROWS = {"cpu": HEAD_ROWS, "cuda": 4 * HEAD_ROWS}  # where many models are compared
HEAD_TOKENS = {"cpu": 256, "cuda": 2048}  # a block, of which every CPU thread has one
SUM_TOKENS = {"cpu": 32, "cuda": 2048}  # of a block at a time, so that FP64 stays in cache
# Through a layer at a time, for each CPU thread; and where sums over batches decide codes.
BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
LEARNING_TOKENS = {"cpu": 2048, "cuda": 8192}

Seen = TypeVar("Seen")


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
    tokens, places = torch.unique(windows.cpu(), return_inverse=True)
    rows = model.weights.some_rows(model.embedding, tokens, device)
    hidden = rows[places.to(device)]
    if (images := model.images) is not None:
        stop = images.start + images.embeddings.shape[1]
        hidden[:, images.start : stop] = images.embeddings.to(device)
    return hidden


def load_layer(model: LayeredModel, number: int, device: torch.device) -> Layer:
    """A decoder layer with its weights, in FP32."""
    module = copy.deepcopy(model.layers[number]).requires_grad_(False)
    weights = {
        name: model.weights.read(f"{model.prefix}layers.{number}.{name}", tuple(w.shape), device)
        for name, w in module.state_dict().items()
    }
    module.load_state_dict(weights, assign=True)
    return Layer(module, model.arguments[number])


@contextmanager
def layers_ahead(models: Sequence[LayeredModel], device: torch.device) -> Iterator[Iterator[Layer]]:
    """Layers with their weights in FP32: the first of each model, the second of each, and so on.

    On a GPU the next one is read while one is used, so that memory holds two. Drop each before you
    ask for the next.
    """
    numbers = [(model, n) for n in range(len(models[0].layers)) for model in models]

    def load(one: tuple[LayeredModel, int]) -> Layer:
        return load_layer(*one, device)

    with ThreadPoolExecutor(1, "lowbit-layers") as reader:  # starts no thread before it has work
        yield ordered(None if device.type == "cpu" else reader, load, numbers, 2)


def load_norm(model: LayeredModel, device: torch.device) -> Layer:
    """The final norm with its weight."""
    weight = model.weights.read(f"{model.prefix}norm.weight", (model.hidden_size,), device)
    norm = copy.deepcopy(model.norm).requires_grad_(False)
    norm.load_state_dict({"weight": weight}, assign=True)
    return Layer(norm, {})


def batches(
    hidden: Tensor, device: torch.device, tokens: Mapping[str, int] | None = None
) -> list[slice]:
    """Windows to pass through a layer at once, covering all of hidden [windows, T, h].

    A GPU's batches are some of a CPU's.
    """
    T, tokens = hidden.shape[1], tokens or BATCH_TOKENS
    least = max(1, tokens["cpu"] // T)
    count = least * max(1, tokens[device.type] // T // least)
    return list(blocks(len(hidden), count))


def pass_through(
    layer: Layer,
    hidden: Tensor,
    device: torch.device,
    pool: Pool,
    tokens: Mapping[str, int] | None = None,
) -> None:
    """Pass windows through a decoder layer, in place.

    Args:
        hidden: [windows, T, h] of the layer's dtype, on the CPU or the device.
        tokens: of a batch, by kind of device; BATCH_TOKENS where left out.
    """
    for _ in passing(layer, hidden, device, pool, lambda: None, tokens):
        pass


def passing(
    layer: Layer,
    hidden: Tensor,
    device: torch.device,
    pool: Pool,
    collect: Callable[[], Seen],
    tokens: Mapping[str, int] | None = None,
) -> Iterator[tuple[slice, Seen]]:
    """Pass windows through a layer as `pass_through` does, which ends with the last batch.

    Args:
        collect: called after every batch, in its thread.

    Yields:
        Windows of a batch and what was collected, in the order of the windows.
    """

    def call(part: slice) -> tuple[Tensor, Seen]:
        return layer(hidden[part].to(device)), collect()

    parts = batches(hidden, device, tokens)
    for part, (out, seen) in zip(parts, ordered(pool, call, parts), strict=True):
        hidden[part] = out.to(hidden.device)
        yield part, seen


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
        pass_through(load_layer(model, number, device), hidden, device, pool)
        advance(1)
    return hidden


def scored_states(model: LayeredModel, hidden: Tensor) -> Tensor:
    """Inputs of the head for the tokens that have a successor: [windows * (T - 1), h].

    Overwrites hidden.
    """
    name = f"{model.prefix}norm.weight"
    weight = model.weights.read(name, (model.hidden_size,), hidden.device).to(hidden.dtype)
    for window in hidden:
        window.copy_(torch.func.functional_call(model.norm, {"weight": weight}, (window,)))
    return hidden[:, :-1].reshape(-1, hidden.shape[-1])


def blocks(total: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `total`."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
