"""Training of a head for multi-token prediction on what its own packed trunk says next.

    minimize  sum over steps k of WEIGHTS[k] * cross-entropy(the k-th draft, the trunk's token)

A step feeds the text's token and the head's own state of the step before, as drafts do. Packed
linears keep their scales: a weight is s * round(p), p begins at the codes, and gradients pass the
rounding as if it were not there. So what is trained is exactly what is stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.original.mtp import LAYER, MtpHead, chained
from lowbit.formats.architectures.names import MTP_FC
from lowbit.formats.layout.scheme import Scheme

WEIGHTS = (0.51, 0.31, 0.18)  # of the steps, as FastMTP has them
ROUNDS = 64  # of a window that steps after the first are trained on
CODE_TRAVEL = 3.0  # codes that p may move in all, as rates fall to zero
CODE_RATE = 0.03  # of p at most, in codes a step
WEIGHT_RATE = 3e-4  # of weights that are not packed, of norms too
SEED = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """A packed linear [N, K] whose codes are trained."""

    scheme: Scheme  # bits and groups
    scale: Tensor  # [N, groups, 1] float32, which stay
    position: Tensor  # p, [N, groups, G] float32

    @classmethod
    def begin(cls, codes: Tensor, scale: Tensor, scheme: Scheme) -> "Grid":
        """Before the first step: [N, K] int8 codes and [N, groups] scales as stored."""
        N, groups = scale.shape
        position = codes.to(torch.float32).view(N, groups, -1).clone().requires_grad_(True)
        return cls(scheme, scale.to(torch.float32)[:, :, None], position)

    def codes(self) -> Tensor:
        """[N, K] int8."""
        return self._rounded().detach().flatten(1).to(torch.int8)

    def weight(self) -> Tensor:
        """[N, K] float32 as it would be read back, with a gradient by p."""
        kept = self.position.clamp(self.scheme.code_min, self.scheme.code_max)
        return ((kept + (self._rounded() - kept).detach()) * self.scale).flatten(1)

    def _rounded(self) -> Tensor:
        return self.position.round().clamp(self.scheme.code_min, self.scheme.code_max)


@dataclass(frozen=True, slots=True)
class Trained:
    """The weights of a head while it is trained."""

    head: MtpHead  # whose modules are used
    grids: Mapping[str, Grid]  # packed linears, by the name of their weight
    plain: Mapping[str, Tensor]  # all other weights, FP32, by name

    def parameters(self) -> dict[str, Tensor]:
        """Everything that is trained, by the name of its weight."""
        return {**{name: grid.position for name, grid in self.grids.items()}, **self.plain}

    def current(self) -> MtpHead:
        """The head with its weights as they would be read back, with their gradients."""
        weights = {name: grid.weight() for name, grid in self.grids.items()} | dict(self.plain)
        inner = {n.removeprefix(LAYER): w for n, w in weights.items() if n.startswith(LAYER)}
        norms = self.head.norms
        return MtpHead(
            norms={name: _Called(norms[name], {"weight": weights[name]}) for name in norms},
            fc=weights[MTP_FC],
            layer=_Called(self.head.layer, inner),
            arguments=self.head.arguments,
        )


class _Called(torch.nn.Module):
    """A module that is called with other weights."""

    def __init__(self, module: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._call = partial(torch.func.functional_call, module, dict(weights))

    def forward(self, x: Tensor, **named: object) -> Any:
        """Output of the module with those weights."""
        return self._call((x,), named)


@dataclass(frozen=True, slots=True)
class TrainingWindow:
    """One window of text."""

    embeddings: Tensor  # [T - 1, h] of its tokens from the second on
    states: Tensor  # [T - 1, h] of the trunk
    # [T - 1] int64, places among the rows of the tokens that the trunk ranks first; -1 where they
    # have none.
    targets: Tensor


def loss_of(head: MtpHead, lesson: TrainingWindow, rows: Tensor, starts: Tensor) -> Tensor:
    """Weighted cross-entropy of the steps on one window.

    Args:
        head: with gradients.
        rows: [rows, h] of the model's head.
        starts: [rounds] columns at which further steps begin.
    """
    S = len(lesson.states)
    text = head.joined(lesson.embeddings, lesson.states)
    columns = torch.arange(S, device=text.device)
    states = head(text, columns, columns[:, None] >= columns)
    loss = WEIGHTS[0] * _entropy(states[:-1], rows, lesson.targets[1:])
    states = states[starts]
    inputs: list[Tensor] = []
    for step, weight in enumerate(WEIGHTS[1:], start=1):
        inputs.append(head.joined(lesson.embeddings[starts + step], states))
        states = head(*chained(text, starts, inputs))[-len(starts) :]
        loss = loss + weight * _entropy(states, rows, lesson.targets[starts + step + 1])
    return loss


def _entropy(states: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(states @ rows.T, targets, ignore_index=-1)


def optimizer(trained: Trained, steps: int) -> torch.optim.Adam:
    """Adam on everything that is trained, before the first of so many steps."""
    groups = [
        {
            "params": [grid.position for grid in trained.grids.values()],
            "lr": min(CODE_RATE, 2 * CODE_TRAVEL / steps),
        },
        {"params": list(trained.plain.values()), "lr": WEIGHT_RATE},
    ]
    return torch.optim.Adam([group for group in groups if group["params"]])


def train(
    trained: Trained,
    adam: torch.optim.Adam,
    lessons: Sequence[TrainingWindow],
    rows: Tensor,
    steps: int,
    done: int = 0,
) -> Iterator[int]:
    """Train in place, a window a step; yields the number of steps taken after each.

    Args:
        rows: [rows, h] of the model's head.
        done: steps that an earlier run has taken.
    """
    rates = [group["lr"] for group in adam.param_groups]
    for step in range(done, steps):
        order = torch.Generator().manual_seed(SEED + step)
        lesson = lessons[int(torch.randint(len(lessons), (1,), generator=order))]
        last = len(lesson.states) - len(WEIGHTS)
        starts = torch.randperm(last, generator=order)[:ROUNDS].to(lesson.states.device)
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / steps)
        adam.zero_grad()
        with torch.enable_grad():
            loss_of(trained.current(), lesson, rows, starts).backward()  # type: ignore[no-untyped-call]
        adam.step()
        yield step + 1
