"""The calibrated methods, decoder layer by decoder layer.

Two sets of hidden states are kept: the original's and those of the model quantized so far. A layer
exists in full precision only while they pass through it, so memory holds one layer, the next one
that is being read, their activations and statistics, whatever the model's size.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from lowbit.convert.original.device import tensor_cores
from lowbit.convert.original.layer import Layer
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.progress import Progress
from lowbit.convert.original.threads import alone_on_threads
from lowbit.convert.original.walk import load_layer, load_norm
from lowbit.convert.plan.plan import Plan
from lowbit.convert.quantize.choose import choose_layer
from lowbit.convert.quantize.linear import LinearQuantizer, QuantizedLinear
from lowbit.convert.quantize.store import (
    HEAD,
    Calibrated,
    LayerError,
    Store,
    extended,
    layer_name,
)
from lowbit.convert.quantize.windows import WindowStates, begin
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.machine.memory import give_back


def calibrate(
    model: LayeredModel,
    samples: Tensor,
    plan: Plan,
    store: Store,
    identity: str,
    device: torch.device,
    progress: Progress,
) -> Calibrated:
    """Choose codes and scales of every linear of the decoder and of the head.

    Layers that the store holds already are only passed through. A layer's identity there covers the
    bytes of all weights up to it: they are hashed as they are read.

    Args:
        samples: [windows, T] int64 token ids; model's arguments are for sequences of T.
        plan: names the method and the linears to quantize; others stay as they are.
        identity: names everything else that codes follow from.

    Raises:
        QuantizationError: activations are not finite.
        CheckpointError: the source cannot be read.
    """
    with alone_on_threads(device) as pool, tensor_cores(device):
        schemes = {module: scheme for module, scheme in plan.schemes.items() if scheme}
        quantizer = LinearQuantizer(plan.method, plan.recipe.rule, device, pool)
        windows = begin(model, samples, device, plan.method.from_original)
        identity = extended(identity, model.weights.checkpoint, _sources(model, [model.embedding]))
        identity = _choose_layers(model, windows, schemes, quantizer, store, identity, progress)
        norm = load_norm(model, device)
        for states in windows.sets():
            quantizer.pass_through(norm, states)
        if "lm_head" in schemes:
            ends = _sources(model, [f"{model.prefix}norm.weight", model.head])
            identity = extended(identity, model.weights.checkpoint, ends)
            if store.load(HEAD, identity, schemes) is None:
                give_back()  # what freed layers leave to each thread
                head = quantizer.head(model, schemes["lm_head"], windows)
                store.save(HEAD, identity, {"lm_head": head}, schemes, None)
    give_back()
    return store.finished()


def _sources(model: LayeredModel, names: Iterable[str]) -> set[str]:
    """Tensors of the checkpoint that some weights are made of."""
    rotation = model.weights.rotation
    return {name if rotation is None else rotation.source(name) for name in names}


def _choose_layers(
    model: LayeredModel,
    windows: WindowStates,
    schemes: Mapping[str, Scheme],
    quantizer: LinearQuantizer,
    store: Store,
    identity: str,
    progress: Progress,
) -> str:
    """Choose all layers, one being read and one written while another is chosen.

    Returns:
        The identity of the last.
    """
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    with ThreadPoolExecutor(1) as later:  # a finished layer is written, come what may
        saved: Future[None] | None = None
        layers = _layers(model, identity, quantizer.device, later)
        for number, (original, identity) in enumerate(layers):
            progress("calibrate", sum(sizes[:number]), sum(sizes))
            kept = store.load(layer_name(number), identity, schemes)
            chosen, error = _layer(model, number, original, windows, schemes, quantizer, kept)
            if saved is not None:
                saved.result()  # its error, if it has one; and one layer waits at a time
            if error is not None:
                name = layer_name(number)
                saved = later.submit(store.save, name, identity, chosen, schemes, error)
        if saved is not None:
            saved.result()
        progress("calibrate", sum(sizes), sum(sizes))
    return identity


def _layer(
    model: LayeredModel,
    number: int,
    original: Layer,
    windows: WindowStates,
    schemes: Mapping[str, Scheme],
    quantizer: LinearQuantizer,
    kept: dict[str, QuantizedLinear] | None,
) -> tuple[dict[str, QuantizedLinear], LayerError | None]:
    """Choose a layer's linears, or take those that are kept, and pass all windows through it.

    Returns:
        The linears by module name, and their error; None where they were kept.
    """
    prefix = f"{model.prefix}layers.{number}."
    layer = Layer(copy.deepcopy(original.module), original.arguments)
    chosen, error = kept, None
    if chosen is None:
        own = {m.removeprefix(prefix): s for m, s in schemes.items() if m.startswith(prefix)}
        quantized, error = choose_layer(quantizer, number, layer, original, own, windows)
        chosen = {f"{prefix}{name}": linear for name, linear in quantized.items()}
    else:
        device = quantizer.device
        layer.put({m.removeprefix(prefix): c.weight.to(device) for m, c in chosen.items()})
        quantizer.pass_through(original, windows.original)
    if windows.hidden is not windows.original:
        quantizer.pass_through(layer, windows.hidden)
    return chosen, error


def _layers(
    model: LayeredModel, identity: str, device: torch.device, later: ThreadPoolExecutor
) -> Iterator[tuple[Layer, str]]:
    """Decoder layers with their weights and identities, each read while the one before is used."""
    source = model.weights.checkpoint

    def load(number: int, before: str) -> tuple[Layer, str]:
        prefix = f"{model.prefix}layers.{number}."
        names = [name for name in source.tensors if name.startswith(prefix)]
        return load_layer(model, number, device), extended(before, source, names)

    ahead = later.submit(load, 0, identity)
    for number in range(1, len(model.layers) + 1):
        layer, identity = ahead.result()
        if number < len(model.layers):
            ahead = later.submit(load, number, identity)
        yield layer, identity
