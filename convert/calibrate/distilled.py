"""The packed model put together for distillation, and taken apart again into the store."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lowbit.convert.calibrate.distill import Fixed, Head, Student, distill
from lowbit.convert.calibrate.learned import Learned
from lowbit.convert.calibrate.store import Store, distilled_name, layer_name
from lowbit.convert.original.layer import Layer
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.progress import Meter, Progress
from lowbit.convert.original.walk import embed, load_layer
from lowbit.convert.plan.calibration_cost import DISTILL_STEPS, learned_together
from lowbit.formats.layout.scheme import Scheme


def distill_layers(
    model: LayeredModel,
    samples: Tensor,
    states: Tensor,
    schemes: Mapping[str, Scheme],
    norm: Layer,
    store: Store,
    device: torch.device,
    pool: ThreadPoolExecutor | None,
    progress: Progress,
) -> None:
    """Learn every quantized linear of the decoder against the original's logits, into the store.

    Args:
        model: the original.
        samples: [windows, T] int64 token ids.
        states: the original's, after the final norm, [windows, T, h] float32.
        schemes: of all quantized linears, by module name.
        norm: the final norm.
        store: holds what was chosen for every layer.
        device: where to compute.
        pool: of `alone_on_threads`.
        progress: called with ("distill", steps done, in all).
    """
    layers: list[Layer] = []
    linears: list[dict[str, Fixed | Learned]] = []
    for number in range(len(model.layers)):
        layer = Layer(load_layer(model, number, device), model.arguments[number])
        found = store.load(distilled_name(number), schemes)
        chosen = found or store.load(layer_name(number), schemes) or {}
        prefix = f"{model.prefix}layers.{number}."
        row = {m.removeprefix(prefix): Fixed.of(c, schemes[m], device) for m, c in chosen.items()}
        layer.put(dict.fromkeys(row, torch.empty(0)))  # the packed ones take their place
        layers.append(layer)
        linears.append({**row})
    original = model.weights.read(model.head, (model.vocabulary, model.hidden_size), device)
    head = store.load_head(schemes) if "lm_head" in schemes else None
    packed = original if head is None else head.weight.to(device)
    student = Student(layers, linears, Head(norm.module, original, packed), pool)
    hidden = embed(model, samples, torch.device("cpu"))
    phases = _phases([_weights(row) for row in linears], learned_together(device.type))
    for place, phase in enumerate(phases):
        if all(store.load(distilled_name(number), schemes) is not None for number in phase):
            continue
        _learn(model, phase, schemes, linears, store, device)
        steps = DISTILL_STEPS * len(phases)
        meter = Meter(progress, "distill", steps, DISTILL_STEPS * place)
        helped = distill(student, hidden, states, device, meter.add)
        _keep(model, phase, schemes, linears, store, device, helped)


def _weights(linears: Mapping[str, Fixed | Learned]) -> int:
    return sum(len(row.words) * row.K for row in linears.values() if isinstance(row, Fixed))


def _phases(weights: Sequence[int], limit: int) -> list[list[int]]:
    """Consecutive layers to learn together, at most `limit` weights; those without any left out."""
    phases: list[list[int]] = []
    held = limit
    for number, count in enumerate(weights):
        if not count:
            continue
        if held + count > limit:
            phases.append([])
            held = 0
        phases[-1].append(number)
        held += count
    return phases


def _learn(
    model: LayeredModel,
    phase: Sequence[int],
    schemes: Mapping[str, Scheme],
    linears: Sequence[dict[str, Fixed | Learned]],
    store: Store,
    device: torch.device,
) -> None:
    """Begin to learn the linears of some layers."""
    for number in phase:
        prefix = f"{model.prefix}layers.{number}."
        for module, chosen in (store.load(layer_name(number), schemes) or {}).items():
            w = model.weights.read(f"{module}.weight", tuple(chosen.codes.shape), device)
            begun = Learned.begin(chosen, w, schemes[module], device)
            linears[number][module.removeprefix(prefix)] = begun


def _keep(
    model: LayeredModel,
    phase: Sequence[int],
    schemes: Mapping[str, Scheme],
    linears: Sequence[dict[str, Fixed | Learned]],
    store: Store,
    device: torch.device,
    helped: bool,
) -> None:
    """Store what some layers have become, or what they were if learning did not help."""
    for number in phase:
        prefix = f"{model.prefix}layers.{number}."
        chosen = store.load(layer_name(number), schemes) or {}
        for name, linear in linears[number].items():
            if helped and isinstance(linear, Learned):
                chosen[f"{prefix}{name}"] = linear.chosen()
        store.save(distilled_name(number), chosen, schemes, None, undistilled=not helped)
        for module, kept in chosen.items():
            fixed = Fixed.of(kept, schemes[module], device)
            linears[number][module.removeprefix(prefix)] = fixed
