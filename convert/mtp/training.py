"""Training of a head for multi-token prediction on what its own packed trunk says next.

    minimize  sum over steps k of WEIGHTS[k] * cross-entropy(the k-th draft, the trunk's token)

A step feeds the text's token and the head's own state of the step before, as drafts do. Packed
linears keep their scales: a weight is s * round(p), p begins at the codes, and gradients pass the
rounding as if it were not there. So what is trained is exactly what is stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.mtp.drafting import Draft, count_drafts
from lowbit.convert.mtp.head import LAYER, NORMS, MtpHead, chained, greedy_tokens, load_mtp_head
from lowbit.convert.original.model import LayeredModel, load_layered_model
from lowbit.convert.original.progress import Meter, Note, Progress
from lowbit.convert.original.threads import Pool
from lowbit.convert.original.walk import HEAD_ROWS, embed, pass_through_all, scored_states
from lowbit.convert.original.weights import open_weights
from lowbit.formats.architectures.names import MTP_FC
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import PACKED, SCALE, pack, unpack
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.packed import PackedCheckpoint
from lowbit.formats.safetensors.sealed import open_sealed, write_sealed

WEIGHTS = (0.51, 0.31, 0.18)  # of the steps, as FastMTP has them
ROUNDS = 64  # of a window that steps after the first are trained on
CODE_TRAVEL = 3.0  # codes that p may move in all, as rates fall to zero
CODE_RATE = 0.03  # of p at most, in codes a step
WEIGHT_RATE = 3e-4  # of weights that are not packed, of norms too
SEED = 0
HELD_OUT = 8  # every eighth window decides and is not learned from
MOST_ROWS = 32_768  # of the head that targets are told apart by


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


@dataclass(frozen=True, slots=True)
class TrunkStates:
    """The trunk's states on all windows, on the device."""

    model: LayeredModel
    windows: Tensor  # [windows, T]
    states: Tensor  # [windows, T - 1, h]
    greedy: Tensor  # [windows, T - 1]

    def part(self, held_out: bool) -> list[int]:
        """Numbers of the windows that are held out, or of the others."""
        return [n for n in range(len(self.windows)) if (n % HELD_OUT == 0) == held_out]


def run_trunk(
    folder: Path, windows: Tensor, device: torch.device, pool: Pool, on_progress: Progress
) -> TrunkStates:
    """Pass all windows through the packed trunk, layer by layer."""
    model = load_layered_model(open_weights(folder), windows.shape[1], device)
    on_progress("states", 0, len(model.layers))
    meter = Meter(on_progress, "states", len(model.layers))
    hidden = pass_through_all(model, windows, device, pool, meter.add)
    states = scored_states(model, hidden)
    greedy = greedy_tokens(model, states, pool)
    shape = (len(windows), windows.shape[1] - 1)
    return TrunkStates(model, windows.to(device), states.view(*shape, -1), greedy.view(shape))


def begin(packed: PackedCheckpoint, model: LayeredModel, device: torch.device) -> Trained:
    """The head as it is stored.

    Raises:
        FormatError: there is none, or one of several layers.
    """
    head = load_mtp_head(model, device)
    if head is None:
        raise FormatError(
            f"`{packed.checkpoint.folder.name}` has no head for multi-token prediction of one layer"
        )
    grids: dict[str, Grid] = {}
    plain: dict[str, Tensor] = {}
    for name in (MTP_FC, *NORMS, *(f"{LAYER}{name}" for name in head.layer.state_dict())):
        module = name.removesuffix(".weight")
        scheme = packed.schemes.get(module)
        if scheme is None:
            weight = packed.checkpoint.read(name).to(device, torch.float32)
            plain[name] = weight.clone().requires_grad_(True)
            continue
        words = packed.checkpoint.read(f"{module}.{PACKED}")
        K = model.weights.shape(name)[1]
        scale = packed.checkpoint.read(f"{module}.{SCALE}").to(device)
        grids[name] = Grid.begin(unpack(words, scheme.bits, K).to(device), scale, scheme)
    return Trained(head, grids, plain)


def count_held_out(trunk: TrunkStates, head: MtpHead, pool: Pool) -> tuple[Draft, ...]:
    """Drafts on the windows that are held out."""
    here = trunk.part(True)
    parts = (trunk.windows[here], trunk.states[here], trunk.greedy[here])
    return count_drafts(trunk.model, *parts, pool, head=head)


def training_windows(
    trunk: TrunkStates, device: torch.device
) -> tuple[list[TrainingWindow], Tensor]:
    """Windows to learn from, and the rows of the head that their targets are among."""
    model, here = trunk.model, trunk.part(False)
    targets = trunk.greedy[here]
    first = torch.arange(min(model.vocabulary, MOST_ROWS), device=device)
    often = torch.unique(targets)[:MOST_ROWS]
    ids = torch.cat((often, first[~torch.isin(first, often)]))[: len(first)].sort().values
    rows = torch.empty(len(ids), model.hidden_size, device=device)
    for start, block in model.weights.rows(model.head, HEAD_ROWS, device):
        among = (ids >= start) & (ids < start + len(block))
        rows[among] = block[ids[among] - start]
    positions = torch.searchsorted(ids, targets).clamp_(max=len(ids) - 1)
    positions = torch.where(ids[positions] == targets, positions, -1)
    embeddings = embed(model, trunk.windows[here][:, 1:], device)
    states = trunk.states[here]
    return [
        TrainingWindow(*parts) for parts in zip(embeddings, states, positions, strict=True)
    ], rows


def stored_tensors(packed: PackedCheckpoint, trained: Trained) -> dict[str, Tensor]:
    """Tensors to store, by name; weights that are not packed become what their dtype holds."""
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, grid in trained.grids.items():
            words = pack(grid.codes().cpu(), grid.scheme.bits)
            tensors[f"{name.removesuffix('.weight')}.{PACKED}"] = words
        for name, weight in trained.plain.items():
            tensors[name] = weight.to(packed.checkpoint.tensors[name].dtype).cpu()
            weight.copy_(tensors[name])
    return tensors


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


def load_state(
    file: Path,
    digest: str,
    parameters: Mapping[str, Tensor],
    adam: torch.optim.Adam,
    note: Note,
) -> int:
    """Take up what an earlier run of the same command left; the number of its steps."""
    if not file.exists():
        return 0
    kept = open_sealed(file, digest)
    if kept is None:
        note(f"! `{file}` is damaged or of another command: training begins again")
        return 0
    step, read = int(kept.facts["step"]), kept.content.read
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(read(name))
            adam.state[value] = {
                "step": torch.tensor(float(step)),
                "exp_avg": read(f"{name}:first").to(value.device),
                "exp_avg_sq": read(f"{name}:second").to(value.device),
            }
    return step


def save_state(
    file: Path, digest: str, step: int, parameters: Mapping[str, Tensor], adam: torch.optim.Adam
) -> None:
    """Keep parameters and their moments after a step."""
    tensors: dict[str, Tensor] = {}
    for name, value in parameters.items():
        tensors[name] = value.detach().cpu()
        tensors[f"{name}:first"] = adam.state[value]["exp_avg"].cpu()
        tensors[f"{name}:second"] = adam.state[value]["exp_avg_sq"].cpu()
    write_sealed(file, tensors, {"step": step}, digest)
