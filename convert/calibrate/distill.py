"""Rounding and scales learned so that the model's next-token distributions are the original's.

    minimize  mean over tokens of KL(softmax(original logits) || softmax(packed logits))

over positions and scales, see `learned`. The model is never whole: a step keeps what goes into each
layer, and the gradient comes back layer by layer, each computed once more. Some consecutive layers
are learned at a time, so that memory holds their positions only; all others stay packed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lowbit.convert.calibrate.learned import Learned, layer_gradient
from lowbit.convert.calibrate.linear import Chosen
from lowbit.convert.calibrate.store import Store, distilled_name, layer_name
from lowbit.convert.calibrate.windows import Batches, count_held
from lowbit.convert.original.layer import Layer
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.progress import Advance, Meter, Progress
from lowbit.convert.original.threads import Pool, ordered
from lowbit.convert.original.walk import HEAD_TOKENS, blocks, embed, load_layer
from lowbit.convert.plan.calibration_cost import DISTILL_STEPS, learned_together
from lowbit.formats.layout.packing import dequantize, pack, unpack
from lowbit.formats.layout.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Fixed:
    """A linear that is not learned now, packed.

    Attributes:
        words: [N, words] int32.
        bits: of a code.
        K: codes in a row.
        scale: [N, K/G] bfloat16.
    """

    words: Tensor
    bits: int
    K: int
    scale: Tensor

    @classmethod
    def of(cls, chosen: Chosen, scheme: Scheme, device: torch.device) -> "Fixed":
        """A linear as it was chosen."""
        words = pack(chosen.codes, scheme.bits).to(device)
        return cls(words, scheme.bits, chosen.codes.shape[1], chosen.scale.to(device))

    def weight(self) -> Tensor:
        """`q * s`, [N, K] float32."""
        return dequantize(unpack(self.words, self.bits, self.K), self.scale)


@dataclass(frozen=True, slots=True)
class Head:
    """The final norm and the heads of both models, which turn hidden states into logits.

    Attributes:
        norm: the final norm's module, with its weights.
        original: head of the original, [V, h] float32.
        packed: head of the packed model, same shape; the same tensor where it is not quantized.
    """

    norm: torch.nn.Module
    original: Tensor
    packed: Tensor


@dataclass(frozen=True, slots=True)
class Student:
    """The packed model.

    Attributes:
        layers: of the decoder, with the weights that are not quantized.
        linears: the quantized linears of each layer, by their name within it.
        head: of both models.
        pool: of `alone_on_threads`.
    """

    layers: Sequence[Layer]
    linears: Sequence[Mapping[str, Fixed | Learned]]
    head: Head
    pool: Pool

    def states(self, hidden: Tensor) -> list[Tensor]:
        """Input of each layer, then the output of the last: [windows, T, h] each."""
        found = [hidden]
        size = 1 if self.pool else len(hidden)
        for number in range(len(self.layers)):
            layer = self._ready(number)
            windows = torch.split(found[-1], size)
            found.append(torch.cat(list(ordered(self.pool, layer, windows))))
            self._release(number)
        return found

    def step(self, hidden: Tensor, original: Tensor, left: float) -> float:
        """One update of all that is learned; the loss before it, nats per token."""
        *inputs, last = self.states(hidden)
        last.requires_grad_(True)
        states = self.head.norm(last)
        loss, gradient = divergence(states.detach(), original, self.head)
        (above,) = torch.autograd.grad(states, last, gradient)
        lowest = min(n for n, row in enumerate(self.linears) if _learned(row))
        for number in range(len(self.layers) - 1, lowest - 1, -1):
            layer, learned = self._ready(number), _learned(self.linears[number])
            given = partial(_given, above)
            above, gradients = layer_gradient(layer, learned, inputs[number], given, self.pool)
            self._release(number)
            for name, linear in learned.items():
                linear.step(gradients[name], left)
        return loss

    def loss(self, hidden: Tensor, original: Tensor) -> float:
        """Nats per token."""
        with torch.no_grad():
            states = self.head.norm(self.states(hidden)[-1])
        return divergence(states, original, self.head)[0]

    def _ready(self, number: int) -> Layer:
        layer = self.layers[number]
        layer.put({name: linear.weight() for name, linear in self.linears[number].items()})
        return layer

    def _release(self, number: int) -> None:
        self.layers[number].put(dict.fromkeys(self.linears[number], torch.empty(0)))


def _learned(linears: Mapping[str, Fixed | Learned]) -> dict[str, Learned]:
    return {name: linear for name, linear in linears.items() if isinstance(linear, Learned)}


def _given(above: Tensor, out: Tensor, part: slice) -> Tensor:
    return above[part]


def distill(
    student: Student,
    hidden: Tensor,
    original: Tensor,
    device: torch.device,
    advance: Advance,
) -> bool:
    """Learn what is to be learned of the student; whether that helped on windows held out.

    Args:
        student: changed in place.
        hidden: what goes into the first layer, [windows, T, h] float32.
        original: the original's states after the final norm, same shape.
        device: where to compute.
        advance: told of 1 after every step.
    """
    used = len(hidden) - count_held(len(hidden))
    held = range(used if used < len(hidden) else 0, len(hidden))

    def judged() -> float:
        losses = [
            student.loss(hidden[n : n + 1].to(device), original[n : n + 1].to(device)) for n in held
        ]
        return sum(losses)

    before = judged()
    for number, batch in enumerate(Batches(used, hidden.shape[1]).take(DISTILL_STEPS)):
        student.step(
            hidden[batch].to(device), original[batch].to(device), 1 - number / DISTILL_STEPS
        )
        advance(1)
    return judged() < before


def divergence(states: Tensor, original: Tensor, head: Head) -> tuple[float, Tensor]:
    """Mean KL of the packed model's distributions from the original's, and its gradient.

    Args:
        states: after the final norm, [windows, T, h] float32.
        original: same of the original.
        head: of both.

    Returns:
        nats per token, and the gradient of the mean by `states`.
    """
    x, y = states.flatten(0, -2), original.flatten(0, -2)
    gradient = torch.empty_like(x)
    total = 0.0
    with torch.no_grad():
        for part in blocks(len(x), HEAD_TOKENS[x.device.type]):
            log_p = (y[part] @ head.original.T).log_softmax(-1)
            log_q = (x[part] @ head.packed.T).log_softmax(-1)
            p = log_p.exp()
            total += float((p * (log_p - log_q)).sum(dtype=torch.float64))
            gradient[part] = log_q.exp_().sub_(p) @ head.packed
    return total / len(x), gradient.view(states.shape) / len(x)


def distill_layers(
    model: LayeredModel,
    samples: Tensor,
    states: Tensor,
    schemes: Mapping[str, Scheme],
    norm: Layer,
    store: Store,
    device: torch.device,
    pool: Pool,
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
        layer = load_layer(model, number, device)
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
