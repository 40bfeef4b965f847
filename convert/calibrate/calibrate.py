"""The calibrated methods, decoder layer by decoder layer.

Two sets of hidden states are kept: the original's and those of the model quantized so far. A layer
exists in full precision only while they pass through it, so memory holds one layer, its activations
and statistics, whatever the model's size.
"""

import copy
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lowbit.convert.calibrate.autoround import learn_rounding
from lowbit.convert.calibrate.distilled import distill_layers
from lowbit.convert.calibrate.gptq import factorize
from lowbit.convert.calibrate.held_out import output_error, split
from lowbit.convert.calibrate.learned import Learned
from lowbit.convert.calibrate.linear import Chosen, gptq, nearest, weighted
from lowbit.convert.calibrate.moments import Moments, head_moments, measure
from lowbit.convert.calibrate.store import (
    HEAD,
    Calibrated,
    LayerError,
    Store,
    distilled_name,
    layer_name,
)
from lowbit.convert.original.layer import Layer, run, stages
from lowbit.convert.original.model import Side
from lowbit.convert.original.threads import alone_on_threads
from lowbit.convert.original.walk import HEAD_ROWS, embed, load_layer
from lowbit.convert.plan.method import Method
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.layout.scheme import Scheme

Phase = Literal["calibrate", "distill"]
Progress = Callable[[Phase, int, int], None]  # phase, done, in all


@dataclass(frozen=True, slots=True)
class Task:
    """All that decides what is chosen, besides the original's weights and the text.

    Attributes:
        method: the steps.
        rule: how scales are searched.
        schemes: of the linears to quantize, by module name; others stay as they are.
    """

    method: Method
    rule: ScaleRule
    schemes: Mapping[str, Scheme]

    def of_layer(self, side: Side, number: int) -> dict[str, Scheme]:
        """Schemes of one decoder layer's linears, by their name within it."""
        prefix = f"{side.prefix}layers.{number}."
        return {
            module.removeprefix(prefix): scheme
            for module, scheme in self.schemes.items()
            if module.startswith(prefix)
        }


def calibrate(
    side: Side,
    samples: Tensor,
    task: Task,
    store: Store,
    device: torch.device,
    progress: Progress,
) -> Calibrated:
    """Choose codes and scales of every linear of the decoder and of the head.

    Layers that the store holds already are only passed through.

    Args:
        side: the original.
        samples: [windows, T] int64 token ids; side's arguments are for sequences of T.
        task: what to do.
        store: of finished layers.
        device: where to compute.
        progress: called after every stage of a layer.

    Raises:
        QuantizationError: activations are not finite.
        CheckpointError: the source cannot be read.
    """
    hidden = embed(side, samples, torch.device("cpu"))
    original_hidden = hidden.clone()
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in side.layers]
    with alone_on_threads(device) as pool:
        work = _Work(task, device, pool)
        for number in range(len(side.layers)):
            progress("calibrate", sum(sizes[:number]), sum(sizes))
            original = Layer(load_layer(side, number, device), side.arguments[number])
            layer = Layer(copy.deepcopy(original.module), side.arguments[number])
            schemes = task.of_layer(side, number)
            prefix = f"{side.prefix}layers.{number}."
            chosen = store.load(layer_name(number), task.schemes)
            if chosen is not None:
                layer.put({m.removeprefix(prefix): c.weight.to(device) for m, c in chosen.items()})
                run(original, original_hidden, device, pool)
            else:
                found, error = work.layer(number, layer, original, schemes, hidden, original_hidden)
                chosen = {f"{prefix}{name}": linear for name, linear in found.items()}
                store.save(layer_name(number), chosen, task.schemes, error)
            run(layer, hidden, device, pool)
        progress("calibrate", sum(sizes), sum(sizes))
        norm = _load_norm(side, device)
        for states in (hidden, original_hidden):
            run(norm, states, device, pool)
        if "lm_head" in task.schemes and store.load_head(task.schemes) is None:
            head = work.head(side, task.schemes["lm_head"], hidden, original_hidden)
            store.save(HEAD, {"lm_head": head}, task.schemes, None)
        if task.method.distill:
            del hidden
            distill_layers(
                side,
                samples,
                original_hidden,
                task.schemes,
                norm,
                store,
                device,
                pool,
                lambda done, total: progress("distill", done, total),
            )
    layers = range(len(side.layers))
    distilled = map(distilled_name, layers) if task.method.distill else ()
    return store.finished([*map(layer_name, layers), *distilled, HEAD])


@dataclass(frozen=True, slots=True)
class _Work:
    """How linears are chosen, and where."""

    task: Task
    device: torch.device
    pool: ThreadPoolExecutor | None

    def layer(
        self,
        number: int,
        layer: Layer,
        original: Layer,
        schemes: Mapping[str, Scheme],
        hidden: Tensor,
        original_hidden: Tensor,
    ) -> tuple[dict[str, Chosen], LayerError]:
        """A layer's linears, put in place, and its error; passes the original's states on."""
        used, held = split(len(hidden))
        before = original_hidden[held]
        found = self.choose(layer, original, schemes, (hidden, original_hidden))
        run(original, original_hidden, self.device, self.pool)
        added = float((original_hidden[held] - before).square().mean(dtype=torch.float64))
        if not math.isfinite(added):
            raise QuantizationError(
                f"layer {number} gives values that are not finite on the calibration text",
                hint="try another --calib text; the checkpoint may be damaged",
            )

        def error(linears: Mapping[str, Chosen]) -> float:
            layer.put({name: linear.weight for name, linear in linears.items()})
            square = output_error(layer, hidden, original_hidden, held, self.device)
            return math.sqrt(square / added) if added else 0.0

        rule = self.task.rule
        plain = {n: nearest(original.weight(n).data, s, rule) for n, s in schemes.items()}
        rtn, chosen = error(plain), error(found)
        if self.task.method.autoround and schemes:
            learned = {
                name: Learned.begin(linear, original.weight(name), schemes[name], self.device)
                for name, linear in found.items()
            }
            states = (hidden, original_hidden)
            learn_rounding(layer, learned, *states, used, self.device, self.pool)
            better = {name: linear.chosen() for name, linear in learned.items()}
            if error(better) < chosen:
                found, chosen = better, error(better)
        layer.put({name: linear.weight for name, linear in found.items()})
        return found, LayerError(number, rtn, chosen)

    def choose(
        self,
        layer: Layer,
        original: Layer,
        schemes: Mapping[str, Scheme],
        hidden: tuple[Tensor, Tensor],
    ) -> dict[str, Chosen]:
        """All linears of a layer, each put in place before those that read its output."""
        found: dict[str, Chosen] = {}
        if self.task.method.codes == "rtn":
            for name, scheme in schemes.items():
                found[name] = nearest(layer.weight(name).data, scheme, self.task.rule)
            return found
        window = hidden[0][:1].to(self.device)
        for names in stages(layer, window, list(schemes)):
            moments = measure(layer, original, names[0], hidden, self.device, self.pool)
            choose = self.chooser(moments)
            for name in names:
                found[name] = choose(layer.weight(name).data, schemes[name])
                layer.put({name: found[name].weight})
        return found

    def chooser(self, moments: Moments) -> Callable[[Tensor, Scheme], Chosen]:
        """How a linear that reads an input of these moments is chosen."""
        rule = self.task.rule
        if self.task.method.codes == "weighted":
            return lambda w, scheme: weighted(w, scheme, rule, moments)
        factor = factorize(moments.damped)
        return lambda w, scheme: gptq(w, scheme, rule, moments, factor)

    def head(self, side: Side, scheme: Scheme, states: Tensor, original: Tensor) -> Chosen:
        """The head, in blocks of rows, from what the final norm gives."""
        rule = self.task.rule
        if self.task.method.codes == "rtn":
            choose: Callable[[Tensor, Scheme], Chosen] = partial(nearest, rule=rule)
        else:
            choose = self.chooser(head_moments(states, original, self.device))
        blocks = side.weights.rows(side.head, HEAD_ROWS, self.device)
        parts = [choose(rows, scheme) for _, rows in blocks]
        codes = torch.cat([part.codes.cpu() for part in parts])
        return Chosen(codes, torch.cat([part.scale.cpu() for part in parts]))


def _load_norm(side: Side, device: torch.device) -> Layer:
    """The final norm with its weight."""
    weight = side.weights.read(f"{side.prefix}norm.weight", (side.hidden_size,), device)
    norm = copy.deepcopy(side.norm).requires_grad_(False)
    norm.load_state_dict({"weight": weight}, assign=True)
    return Layer(norm, {})
