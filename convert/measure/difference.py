"""Differences between two packed checkpoints: configuration, recipe, and every tensor."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from lowbit.convert.original.progress import Progress
from lowbit.convert.original.weights import Weights, weights_of
from lowbit.formats.architectures.names import any_expert
from lowbit.formats.errors import CheckpointError
from lowbit.formats.layout.manifest import is_rotated
from lowbit.formats.layout.packing import PACKED, SCALE, unpack
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.packed import PackedCheckpoint, open_packed
from lowbit.formats.row_folders import ROW_FILES
from lowbit.formats.safetensors.hashing import hash_file

BLOCK_WEIGHTS = 1 << 22  # read at a time
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A value of config.json or of the recipe that differs; None where a side lacks it."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class LinearDifference:
    """A linear whose weights differ, or all experts of a layer that do."""

    module: str  # its name; `*` stands for the numbers of experts
    a: str  # scheme in the first folder, `BF16` and the like where it is not packed
    b: str  # same in the second
    codes: float | None  # share of codes that differ; None where the schemes do
    scales: float | None  # share of scales that differ; None where the schemes do
    distance: float  # |A - B| / |A| of the weights that a reader sees
    linears: int = 1  # how many differ; the other figures are of these


@dataclass(frozen=True, slots=True)
class Difference:
    """Two packed checkpoints of one architecture."""

    config: tuple[ChangedValue, ...]  # of config.json, the quantization section aside
    recipe: tuple[ChangedValue, ...]  # of lowbit.json, empty where a side has none
    # Tensors that only the first has; of linears, those packed differently are not here
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]  # same of the second
    linears: tuple[LinearDifference, ...]  # that differ
    others: tuple[str, ...]  # names of other tensors that differ
    equal: int  # weights and other tensors that are the same, byte for byte
    other_basis: bool  # one of the two is rotated, so that all weights differ in alike models too

    @property
    def same(self) -> bool:
        """True if a reader would see no difference."""
        return not (self.config or self.only_a or self.only_b or self.linears or self.others)


class _Change(NamedTuple):
    """The difference of one linear; `error` and `power` are sums of squares."""

    module: str
    a: str
    b: str
    codes: float | None
    scales: float | None
    error: float
    power: float


def difference(a: Path, b: Path, progress: Progress) -> Difference:
    """Compare two folders, reading both in blocks.

    Raises:
        LowbitError: a folder that cannot be read.
        CheckpointError: weights of other shapes.
    """
    packed = (open_packed(a), open_packed(b))
    weights = (weights_of(packed[0].checkpoint), weights_of(packed[1].checkpoint))
    names = [_names(side) for side in packed]
    both = [name for name in names[0] if name in names[1]]
    modules = {spec.name: spec.module for spec in packed[0].specs if spec.quantizable}
    changes: list[_Change] = []
    others = []
    for number, name in enumerate(both):
        progress("compare", number, len(both))
        if name in modules:
            change = _compare(packed, weights, modules[name], name)
            changes += [] if change is None else [change]
        elif name in ROW_FILES:
            others += [] if hash_file(a / name) == hash_file(b / name) else [name]
        elif not _same_bytes(weights, name):
            others.append(name)
    progress("compare", 1, 1)
    manifests = [side.manifest for side in packed if side.manifest is not None]
    recipes = [manifest.recipe for manifest in manifests]
    return Difference(
        config=_changed_values(*(_plain(side.checkpoint.config) for side in packed)),
        recipe=_changed_values(*recipes) if len(recipes) == 2 else (),
        only_a=tuple(sorted(names[0].keys() - names[1])),
        only_b=tuple(sorted(names[1].keys() - names[0])),
        linears=_rows(changes),
        others=tuple(others),
        equal=len(both) - len(changes) - len(others),
        other_basis=len({is_rotated(side.manifest) for side in packed}) > 1,
    )


def _names(packed: PackedCheckpoint) -> dict[str, None]:
    names = [spec.name for spec in packed.specs]
    names += sorted(info.name for info in packed.carried)
    names += [name for name in ROW_FILES if (packed.checkpoint.folder / name).exists()]
    return dict.fromkeys(names)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "quantization_config"}


def _changed_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[ChangedValue, ...]:
    keys = dict.fromkeys([*a, *b])
    return tuple(
        ChangedValue(key, a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)
    )


def _same_bytes(weights: tuple[Weights, Weights], name: str) -> bool:
    first, second = (side.checkpoint for side in weights)
    info, other = first.tensors[name], second.tensors[name]
    if (info.dtype, info.shape) != (other.dtype, other.shape):
        return False
    rows = max(1, BLOCK_WEIGHTS * info.dtype.itemsize // max(1, info.row_bytes))
    blocks = zip(first.rows(name, rows), second.rows(name, rows), strict=True)
    return all(
        torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))
        for (_, x), (_, y) in blocks
    )


def _compare(
    packed: tuple[PackedCheckpoint, PackedCheckpoint],
    weights: tuple[Weights, Weights],
    module: str,
    name: str,
) -> _Change | None:
    schemes = [side.schemes.get(module) for side in packed]
    scheme = schemes[0] if schemes[0] == schemes[1] else None
    stored = [name] if schemes == [None, None] else [f"{module}.{PACKED}", f"{module}.{SCALE}"]
    if schemes[0] == schemes[1] and all(_same_bytes(weights, tensor) for tensor in stored):
        return None
    shapes = [side.shape(name) for side in weights]
    if shapes[0] != shapes[1]:
        raise CheckpointError(f"`{module}` is {list(shapes[0])} and {list(shapes[1])}")
    N, K = shapes[0]
    rows = max(1, BLOCK_WEIGHTS // K)
    error = power = 0.0
    for (_, x), (_, y) in zip(
        weights[0].rows(name, rows, CPU), weights[1].rows(name, rows, CPU), strict=True
    ):
        error += float((x - y).square_().sum(dtype=torch.float64))
        power += float(x.square().sum(dtype=torch.float64))
    codes, scales = (None, None) if scheme is None else _changed(weights, module, scheme, N, K)
    a, b = (
        side.checkpoint.tensors[name].dtype_name if own is None else str(own)
        for own, side in zip(schemes, weights, strict=True)
    )
    return _Change(module, a, b, codes, scales, error, power)


def _rows(changes: Sequence[_Change]) -> tuple[LinearDifference, ...]:
    """A row of every linear, one for all experts of a layer with the same schemes."""
    groups: dict[tuple[str, str, str], list[_Change]] = {}
    for change in changes:
        groups.setdefault((any_expert(change.module), change.a, change.b), []).append(change)
    return tuple(
        LinearDifference(
            module=module,
            a=a,
            b=b,
            codes=_mean(change.codes for change in members),
            scales=_mean(change.scales for change in members),
            distance=_distance(sum(c.error for c in members), sum(c.power for c in members)),
            linears=len(members),
        )
        for (module, a, b), members in groups.items()
    )


def _distance(error: float, power: float) -> float:
    return math.sqrt(error / power) if power else math.inf if error else 0.0


def _mean(shares: Iterable[float | None]) -> float | None:
    """Mean over linears of one size; None where the share of one is not known."""
    values = list(shares)
    known = [share for share in values if share is not None]
    return fmean(known) if len(known) == len(values) else None


def _changed(
    weights: tuple[Weights, Weights], module: str, scheme: Scheme, N: int, K: int
) -> tuple[float, float]:
    rows = max(1, BLOCK_WEIGHTS // K)
    codes = 0
    for start in range(0, N, rows):
        stop = min(start + rows, N)
        x, y = (
            unpack(side.checkpoint.read_rows(f"{module}.{PACKED}", start, stop), scheme.bits, K)
            for side in weights
        )
        codes += int((x != y).sum())
    s, t = (side.checkpoint.read(f"{module}.{SCALE}") for side in weights)
    return codes / (N * K), float((s != t).double().mean())
