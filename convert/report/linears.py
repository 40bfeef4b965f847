"""Packed linears by kind, and those with the largest errors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from lowbit.convert.measure.weights import WeightQuality
from lowbit.formats.architectures.names import MTP_PREFIX, split_layer
from lowbit.formats.layout.scheme import Scheme, of_most_weights

EXPERTS = ("experts", "shared_expert")  # modules whose linears are named like those of a plain MLP


@dataclass(frozen=True, slots=True)
class LinearKind:
    """The linears of one kind and scheme in all layers."""

    name: str  # last part of the module name, `q_proj`; of experts the last two
    scheme: str  # short form, `INT4 g128`
    rows: tuple[WeightQuality, ...]

    @property
    def mean_error(self) -> float:
        """Mean relative error."""
        return fmean(row.relative_l2 for row in self.rows)

    @property
    def worst(self) -> WeightQuality:
        """The linear with the largest relative error."""
        return max(self.rows, key=lambda row: row.relative_l2)

    @property
    def mean_output_error(self) -> float | None:
        """Mean relative error of the outputs; None where it was not measured."""
        found = [row.output_error for row in self.rows if row.output_error is not None]
        return fmean(found) if found else None

    @property
    def clipped_share(self) -> float:
        """Share of clipped weights over all its linears."""
        clipped = sum(row.clipped_share * row.weights for row in self.rows)
        return clipped / sum(row.weights for row in self.rows)


def scheme_text(row: WeightQuality) -> str:
    """Short form of a row's scheme, `INT4 g128`."""
    return str(Scheme(row.bits, row.group_size))


def layer_of(name: str) -> tuple[int | None, str]:
    """Decoder layer of a linear, None outside of layers, and its kind."""
    owner, _, last = name.replace(".*.", ".").rpartition(".")
    owner = owner.rpartition(".")[2]
    kind = f"{owner}.{last}" if owner in EXPERTS else last
    if name.startswith(MTP_PREFIX):  # its layers are no layers of the decoder
        return None, MTP_PREFIX + kind
    layer = split_layer(name).layer
    return layer, name if layer is None else kind


def kinds(rows: Sequence[WeightQuality]) -> list[LinearKind]:
    """Linears grouped by kind and scheme, in the order of the file."""
    groups: dict[tuple[str, str], list[WeightQuality]] = {}
    for row in rows:
        groups.setdefault((layer_of(row.name)[1], scheme_text(row)), []).append(row)
    return [LinearKind(name, scheme, tuple(group)) for (name, scheme), group in groups.items()]


def worst(
    rows: Sequence[WeightQuality], count: int, by_output: bool = False
) -> list[WeightQuality]:
    """Linears with the largest error of weights, or of outputs; largest first."""

    def error(row: WeightQuality) -> float:
        return (row.output_error or 0.0) if by_output else row.relative_l2

    return sorted(rows, key=lambda row: -error(row))[:count]


def main_bits(rows: Iterable[WeightQuality]) -> int | None:
    """Bits of most of the packed weights; None where nothing is packed."""
    return of_most_weights((row.bits, row.weights) for row in rows)
