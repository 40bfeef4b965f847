"""Heat map of errors: kinds of linear by layers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.report.formatting import percent
from lowbit.convert.report.linears import layer_of, scheme_text

NUMBERS_ALWAYS = 8  # up to so many layers, figures fit on a phone
NUMBERS_WIDE = 24  # up to so many layers, figures fit on a screen
LABELLED = 12  # numbered columns, where not all numbers fit


@dataclass(frozen=True, slots=True)
class Cell:
    """The figure of one linear.

    Attributes:
        text: the figure in percent, without the sign.
        title: name, scheme and figure.
        strength: of the colour, 0 to 1.
    """

    text: str
    title: str
    strength: float


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A figure of every linear inside the layers.

    Attributes:
        title: name of the figure.
        layers: layer numbers of the columns.
        labels: text above each column, empty where there is no room.
        rows: kind of linear, and its cell in every layer, None where the layer has none.
        density: screens on which figures fit into the cells: `always`, `wide` or `never`.
        full: figure at which the colour is strongest.
        largest: largest figure.
        worst: name of the linear with the largest figure.
    """

    title: str
    layers: tuple[int, ...]
    labels: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    density: str
    full: str
    largest: str
    worst: str


def heat_maps(rows: Sequence[WeightQuality]) -> list[HeatMap]:
    """Heat maps of the output error and of the weight error, where they were measured."""
    figures: tuple[tuple[str, Callable[[WeightQuality], float | None]], ...] = (
        ("Output error", lambda row: row.output_error),
        ("Weight error", lambda row: row.relative_l2),
    )
    maps = (_heat_map(title, rows, figure) for title, figure in figures)
    return [found for found in maps if found is not None]


def _heat_map(
    title: str, rows: Sequence[WeightQuality], figure: Callable[[WeightQuality], float | None]
) -> HeatMap | None:
    places: dict[str, dict[int, tuple[WeightQuality, float]]] = {}
    for row in rows:
        layer, kind = layer_of(row.name)
        value = figure(row)
        if layer is not None and value is not None:
            places.setdefault(kind, {})[layer] = row, value
    found = [pair for cells in places.values() for pair in cells.values()]
    if not found:
        return None
    # A hybrid's first layer lacks attention, whose rows would come after the MLP's unsorted.
    kinds = sorted(places, key=lambda kind: ".mlp." in next(iter(places[kind].values()))[0].name)
    worst, largest = max(found, key=lambda pair: pair[1])
    # At least twice the median, so that a map of even figures stays pale.
    finite = [value for _, value in found if math.isfinite(value)] or [0.0]
    full = max(*finite, 2 * median(finite))
    layers = sorted({layer for cells in places.values() for layer in cells})
    every = 1 if len(layers) <= NUMBERS_WIDE else math.ceil(len(layers) / LABELLED)
    return HeatMap(
        title=title,
        layers=tuple(layers),
        labels=tuple("" if n % every else str(layer) for n, layer in enumerate(layers)),
        rows=tuple(
            (kind, tuple(_cell(places[kind].get(layer), full) for layer in layers))
            for kind in kinds
        ),
        density=_density(len(layers)),
        full=percent(full),
        largest=percent(largest),
        worst=worst.name,
    )


def _cell(pair: tuple[WeightQuality, float] | None, full: float) -> Cell | None:
    if pair is None:
        return None
    row, value = pair
    strength = min(1.0, value / full) if full else 0.0
    digits = 1 if value >= 0.01 else 2
    return Cell(
        text=f"{100 * value:.{digits}f}" if math.isfinite(value) else "∞",
        title=f"{row.name}, {scheme_text(row)}: {percent(value)}",
        strength=round(strength, 3),
    )


def _density(layers: int) -> str:
    if layers <= NUMBERS_ALWAYS:
        return "always"
    return "wide" if layers <= NUMBERS_WIDE else "never"
