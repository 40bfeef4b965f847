"""Heat map of errors: kinds of linear by layers."""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.report.formatting import percent
from lowbit.convert.report.linears import layer_of, scheme_text

NUMBERS_WIDE = 24  # up to so many layers, figures fit on a screen; up to 8, on a phone
DENSITIES = ((8, "always"), (NUMBERS_WIDE, "wide"))
LABELLED = 12  # numbered columns, where not all numbers fit


class Cell(NamedTuple):
    """The figure of one linear in percent, its name and scheme, and the colour, from 0 to 1."""

    text: str
    title: str
    strength: float


class HeatMap(NamedTuple):
    """A figure of every linear inside the layers."""

    title: str
    layers: tuple[int, ...]
    labels: tuple[str, ...]  # above each column; empty where there is no room
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]  # kind, and its cell in every layer
    density: str  # screens on which figures fit into the cells: `always`, `wide` or `never`
    full: str  # figure at which the colour is strongest
    largest: str
    worst: str  # name of the linear with the largest figure


def heat_maps(rows: Sequence[WeightQuality]) -> list[HeatMap]:
    """Heat maps of the output error and of the weight error, where they were measured."""
    figures = {"Output error": "output_error", "Weight error": "relative_l2"}
    maps = (_heat_map(title, rows, figure) for title, figure in figures.items())
    return [found for found in maps if found is not None]


def _heat_map(title: str, rows: Sequence[WeightQuality], figure: str) -> HeatMap | None:
    places: dict[str, dict[int, tuple[WeightQuality, float]]] = {}
    for row in rows:
        layer, kind = layer_of(row.name)
        value: float | None = getattr(row, figure)
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
        density=next((name for most, name in DENSITIES if len(layers) <= most), "never"),
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
