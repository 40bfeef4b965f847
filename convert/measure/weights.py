"""Error of packed weights against their source, accumulated block by block."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from lowbit.convert.measure.pair import Pair
from lowbit.convert.original.device import open_device
from lowbit.convert.original.progress import Meter, Progress, silent
from lowbit.convert.original.weights import Weights
from lowbit.formats.architectures.names import any_expert, expert_of
from lowbit.formats.errors import CheckpointError
from lowbit.formats.layout.scheme import Scheme

BLOCK_WEIGHTS = 1 << 22  # read at a time


@dataclass(frozen=True, slots=True)
class WeightQuality:
    """One quantized tensor, or one of every expert of a layer, against its source."""

    name: str  # of the module, without `.weight`; `*` stands for the numbers of experts
    bits: int  # of a code
    group_size: int | None  # weights that share a scale; None for a whole row
    weights: int  # number of weights
    cosine: float  # of the flattened tensors
    relative_l2: float  # |packed - source| / |source|
    sqnr_db: float  # -20 log10(relative_l2)
    clipped_share: float  # share of weights that lie more than half a step beyond the code range
    # |x (W - P)^T| / |x W^T| on inputs x that the original gets from the evaluation text; None
    # where it was not measured. Of experts, over the tokens routed to them
    output_error: float | None = None
    # Number of the expert with the largest relative error; None for one tensor
    worst_expert: int | None = None
    worst_expert_l2: float | None = None  # its relative error


@dataclass(slots=True)
class WeightSums:
    """Running sums of one tensor."""

    source: float = 0.0  # sum w^2
    packed: float = 0.0  # sum p^2
    product: float = 0.0  # sum w p
    error: float = 0.0  # sum (p - w)^2
    clipped: int = 0
    weights: int = 0

    def add(self, w: Tensor, packed: Tensor, scale: Tensor, scheme: Scheme) -> None:
        """Add a block of rows.

        Args:
            w: [rows, K] source weights.
            packed: [rows, K] float32, as a reader dequantizes them.
            scale: [rows, K/G] stored scales.
            scheme: code range; where it has zero points, clipping is not counted.
        """
        w = w.to(torch.float32)
        self.source += _dot(w, w)
        self.packed += _dot(packed, packed)
        self.product += _dot(w, packed)
        error = packed - w
        self.error += _dot(error, error)
        if scheme.symmetric:
            rows, groups = scale.shape
            # Not told from the error: a calibrated code may lie further than half a step away.
            steps = w.view(rows, groups, -1) / scale.to(torch.float32)[:, :, None]
            beyond = (steps > scheme.code_max + 0.5) | (steps < scheme.code_min - 0.5)
            self.clipped += int(beyond.sum())
        self.weights += w.numel()

    def merge(self, other: "WeightSums") -> None:
        """Add the sums of other blocks."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def relative_l2(self) -> float:
        """The error's norm over the source's; an all-zero tensor that stays zero is perfect."""
        return math.sqrt(self.error / self.source) if self.source else 0.0

    def finish(self, name: str, scheme: Scheme) -> WeightQuality:
        """The figures of the tensor."""
        relative = self.relative_l2
        norms = math.sqrt(self.source * self.packed)
        return WeightQuality(
            name=name,
            bits=scheme.bits,
            group_size=scheme.group_size,
            weights=self.weights,
            cosine=min(1.0, self.product / norms) if norms else 1.0,
            relative_l2=relative,
            sqnr_db=-20 * math.log10(relative) if relative else math.inf,
            clipped_share=self.clipped / self.weights if self.weights else 0.0,
        )


def quality_rows(linears: Iterable[tuple[str, Scheme, WeightSums]]) -> tuple[WeightQuality, ...]:
    """A row of every linear, one for all experts of a layer, in the given order."""
    groups: dict[tuple[str, Scheme], dict[str, WeightSums]] = {}
    for module, scheme, sums in linears:
        groups.setdefault((any_expert(module), scheme), {})[module] = sums
    rows = []
    for (name, scheme), members in groups.items():
        total = WeightSums()
        for sums in members.values():
            total.merge(sums)
        row = total.finish(name, scheme)
        worst = max(members, key=lambda module: members[module].relative_l2)
        if (expert := expert_of(worst)) is not None:
            error = members[worst].relative_l2
            row = replace(row, worst_expert=expert, worst_expert_l2=error)
        rows.append(row)
    return tuple(rows)


def _dot(a: Tensor, b: Tensor) -> float:
    """Sum of products: FP32 within a row, FP64 over rows."""
    return float(torch.linalg.vecdot(a, b).sum(dtype=torch.float64))


def measure_weights(
    pair: Pair,
    device: str = "cpu",
    progress: Progress = silent,
) -> tuple[WeightQuality, ...]:
    """One row a packed linear, or for all experts of a layer, in the order of the file.

    Args:
        pair: the original, and the folder made from it by any tool.

    Raises:
        CheckpointError: a folder that cannot be read, or a linear the source lacks.
        FormatError: packed weights that break the layout.
        ResourceError: a GPU is asked for where there is none.
    """
    target = open_device(device)
    originals, quantized = pair.original, pair.packed
    schemes = quantized.packed_schemes()
    if not schemes:
        raise CheckpointError(f"`{quantized.checkpoint.folder}` holds no packed linear")
    sizes = {module: _size(quantized, module) for module in schemes}
    meter = Meter(progress, "weights", sum(sizes.values()))
    linears = []
    for module, scheme in schemes.items():
        name = _source_name(originals, module)
        if originals.shape(name) != quantized.shape(f"{module}.weight"):
            raise CheckpointError(
                f"`{module}` is {list(quantized.shape(f'{module}.weight'))} in `{quantized.name}`, "
                f"{list(originals.shape(name))} in `{originals.name}`"
            )
        count = max(1, BLOCK_WEIGHTS // originals.shape(name)[1])
        sums = WeightSums()
        blocks = quantized.packed_rows(module, count, target)
        for (_, w), (_, p, scale) in zip(originals.rows(name, count, target), blocks, strict=True):
            sums.add(w, p, scale, scheme)
        linears.append((module, scheme, sums))
        meter.add(sizes[module])
    return quality_rows(linears)


def _size(weights: Weights, module: str) -> int:
    N, K = weights.shape(f"{module}.weight")
    return N * K


def _source_name(originals: Weights, module: str) -> str:
    """The weight that a packed linear was made from; a tied head is the embedding."""
    tensors = originals.checkpoint.tensors
    tied = originals.checkpoint.tied and originals.rotation is None
    if module.endswith("lm_head") and tied:
        return next((n for n in tensors if n.endswith("embed_tokens.weight")), f"{module}.weight")
    return f"{module}.weight"
