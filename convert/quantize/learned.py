"""A linear whose rounding and scales are learned: codes round(p), weights S (1 + a) round(p).

p is where a weight lies in steps of its scale. It begins at the original weight, or at the edge of
the cell of the code that was chosen if it lies outside, so that what hardly decided for one of two
codes is changed most easily. Gradients pass the rounding as if it were not there (Cheng et al.,
SignRound, arXiv 2309.05516).

`learn_rounding` minimizes |layer(x) - original(x~)|^2, where x is what the quantized model so far
gives and x~ what the original gives.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.original.layer import Layer
from lowbit.convert.original.threads import Pool, ordered
from lowbit.convert.plan.calibration_cost import AUTOROUND_STEPS
from lowbit.convert.quantize.linear import QuantizedLinear
from lowbit.convert.quantize.windows import WindowStates, random_batches
from lowbit.formats.layout.rtn import SCALE_DTYPE
from lowbit.formats.layout.scheme import Scheme

EDGE = 0.49
POSITION_RATE = 5e-4  # of p, in codes a step; falls to zero
SCALE_RATE = 2e-3  # of a; falls to zero
BETAS = (0.9, 0.99)  # of Adam; the second one of `GroupScaled` too
EPS = 1e-20  # gradients of a mean over tokens may be small


def layer_gradient(
    layer: Layer, names: Iterable[str], x: Tensor, target: Tensor, pool: Pool
) -> dict[str, Tensor]:
    """Gradients of half the squared error of the layer's output, by the weights of its linears.

    Args:
        layer: any, its weights in place.
        x: what goes in, [windows, T, h] float32.
        target: what should come out, same shape.
        pool: of `alone_on_threads`; a window is a task.

    Returns:
        [N, K] by name.
    """
    weights = {name: layer.weight(name) for name in names}
    for weight in weights.values():
        weight.requires_grad_(True)

    def one(part: slice) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            out = layer(x[part])
            return torch.autograd.grad(out, [*weights.values()], out.detach() - target[part])

    parts = [slice(0, len(x))] if pool is None else [slice(i, i + 1) for i in range(len(x))]
    totals: tuple[Tensor, ...] = ()
    for gradients in ordered(pool, one, parts):
        if totals:
            gradients = tuple(a.add_(b) for a, b in zip(totals, gradients, strict=True))
        totals = gradients
    for weight in weights.values():
        weight.requires_grad_(False)
    return dict(zip(weights, totals, strict=True))


@dataclass(slots=True)
class GroupScaled:
    """Gradient descent with steps relative to the gradient's size in each group of weights.

    Adam without momentum and with one running mean of squares a group: next to no memory beyond
    the value itself.
    """

    value: Tensor
    rate: float
    square: Tensor
    steps: int = 0

    @classmethod
    def on(cls, value: Tensor, rate: float) -> "GroupScaled":
        """Begin; groups are along the last dimension."""
        return cls(value, rate, torch.zeros_like(value[..., :1]))

    def step(self, gradient: Tensor, left: float) -> None:
        """One update, at the share of the rate that is left."""
        self.steps += 1
        self.square.lerp_(gradient.square().mean(-1, keepdim=True), 1 - BETAS[1])
        size = (self.square / (1 - BETAS[1] ** self.steps)).sqrt_()
        self.value -= (self.rate * left) * gradient / (size + EPS)


@dataclass(frozen=True, slots=True)
class Learned:
    """One linear [N, K] while it is learned."""

    scheme: Scheme  # bits and groups
    scale: Tensor  # before learning, [N, groups, 1] float32
    position: GroupScaled  # p, [N, groups, G] float32
    change: Tensor  # a, [N, groups, 1] float32
    adam: torch.optim.Adam  # changes `change`

    @classmethod
    def begin(
        cls, chosen: QuantizedLinear, w: Tensor, scheme: Scheme, device: torch.device
    ) -> "Learned":
        """Before the first step.

        Args:
            chosen: codes and scales to begin with.
            w: [N, K] original weights.
        """
        N, groups = chosen.scale.shape
        scale = chosen.scale.to(device, torch.float32)[:, :, None]
        codes = chosen.codes.to(device, torch.float32).view(N, groups, -1)
        away = (w.to(device, torch.float32).view(codes.shape) / scale).sub_(codes)
        position = GroupScaled.on(codes + away.clamp_(-EDGE, EDGE), POSITION_RATE)
        change = torch.zeros_like(scale)
        return cls(
            scheme, scale, position, change, torch.optim.Adam([change], betas=BETAS, eps=EPS)
        )

    def codes(self) -> Tensor:
        """[N, groups, G] float32, whole numbers."""
        return self.position.value.round().clamp_(self.scheme.code_min, self.scheme.code_max)

    def stored_scale(self) -> Tensor:
        """[N, groups, 1] bfloat16."""
        return (self.scale * (1 + self.change)).to(SCALE_DTYPE)

    def weight(self) -> Tensor:
        """[N, K] float32, as it would be read back."""
        return self.codes().mul_(self.stored_scale().float()).flatten(1)

    def step(self, gradient: Tensor, left: float) -> None:
        """One update, given the gradient by the weight [N, K], at the share of the rates left."""
        codes = self.codes()
        gradient = gradient.view(codes.shape)
        self.change.grad = (gradient * codes).sum(-1, keepdim=True).mul_(self.scale)
        self.adam.param_groups[0]["lr"] = SCALE_RATE * left
        self.adam.step()
        # Beyond the code range a weight cannot follow its gradient.
        self.position.step(
            gradient * self.scale * (codes - self.position.value).abs_().le_(0.5), left
        )

    def chosen(self) -> QuantizedLinear:
        """Codes and scales after the last step."""
        return QuantizedLinear(self.codes().flatten(1).to(torch.int8), self.stored_scale()[:, :, 0])


def learn_rounding(
    layer: Layer,
    original: Layer,
    quantized: Mapping[str, QuantizedLinear],
    schemes: Mapping[str, Scheme],
    windows: WindowStates,
    device: torch.device,
    pool: Pool,
) -> dict[str, QuantizedLinear]:
    """Linears of a layer after their rounding has been learned.

    Args:
        layer: its quantized linears are overwritten.
        quantized: codes and scales to begin with, by name.
        windows: hidden states before the layer, and after it those of the original.
    """
    linears = {
        name: Learned.begin(linear, original.weight(name), schemes[name], device)
        for name, linear in quantized.items()
    }
    batches = random_batches(windows.learned, windows.hidden.shape[1], AUTOROUND_STEPS)
    for number, batch in enumerate(batches):
        target = windows.original[batch].to(device)
        layer.put({name: linear.weight() for name, linear in linears.items()})
        x = windows.hidden[batch].to(device)
        for name, gradient in layer_gradient(layer, linears, x, target, pool).items():
            linears[name].step(gradient, 1 - number / AUTOROUND_STEPS)
    return {name: linear.chosen() for name, linear in linears.items()}
