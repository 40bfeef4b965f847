"""Sensitivities as a heat map: sets by layers, at one precision, on a logarithmic scale."""

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from lowbit.convert.plan.sensitivities import Row, Sensitivities
from lowbit.convert.plan.sets import inside_layer, layer_number
from lowbit.convert.report import words
from lowbit.formats.printable import printable

BITS = 4
CELL, ROW, LEFT, TOP, BOTTOM = 34, 26, 190, 66, 30
LEAST_COLUMNS = 12  # that the title and the scale need
LOW, HIGH = (235, 241, 250), (8, 48, 107)  # of the colour scale: red, green, blue
INK, PAPER = "#1f2933", "#ffffff"
DECADES = 4  # of the scale, below the largest figure
HEAD = "head"


def heat_map(sensitivities: Sensitivities) -> bytes:
    """A self-contained SVG of the KL of every set at INT4, at the largest group size measured.

    Args:
        sensitivities: with at least one row of BITS bits.
    """
    rows = _shown(sensitivities.rows)
    cells = {(inside_layer(row.name), _column(row)): row for row in rows}
    kinds = list(dict.fromkeys(kind for kind, _ in cells))
    layers = sorted({layer for _, layer in cells if layer != HEAD}, key=int)
    columns = [*layers, HEAD] if any(layer == HEAD for _, layer in cells) else layers
    finite = [row.kl for row in rows if math.isfinite(row.kl) and row.kl > 0] or [1.0]
    top = math.log10(max(finite))
    bottom = max(math.log10(min(finite)), top - DECADES)
    width = LEFT + CELL * max(len(columns), LEAST_COLUMNS) + 20
    height = TOP + ROW * len(kinds) + BOTTOM
    svg = Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=str(width),
        height=str(height),
        attrib={"font-family": "sans-serif", "font-size": "12"},
    )
    _box(svg, 0, 0, (width, height), PAPER)
    schemes = " and ".join(dict.fromkeys(str(row.scheme) for row in rows))
    title = f"Mean KL (nats a token) with one set at {schemes}"
    _text(svg, 12, 22, title, attrib={"font-weight": "bold", "font-size": "14"})
    text = printable(sensitivities.text_name)
    _text(svg, 12, 42, f"log10, layer by layer; on {text}")
    for x, column in enumerate(columns):
        _text(svg, LEFT + CELL * x + CELL / 2, TOP - 6, column, middle=True)
    for y, kind in enumerate(kinds):
        _text(svg, 12, TOP + ROW * y + ROW / 2 + 4, printable(kind))
        for x, column in enumerate(columns):
            row = cells.get((kind, column))
            if row is not None:
                _cell(svg, row, (LEFT + CELL * x, TOP + ROW * y), (bottom, top))
    return bytes(tostring(svg, encoding="utf-8"))


def _shown(rows: Sequence[Row]) -> list[Row]:
    """Rows of BITS bits and the largest group, one for every set."""
    found: dict[str, Row] = {}
    for row in rows:
        known = found.get(row.name)
        if row.bits == BITS and (known is None or known.group_size < row.group_size):
            found[row.name] = row
    return list(found.values())


def _column(row: Row) -> str:
    layer = layer_number(row.name)
    return HEAD if layer is None else str(layer)


def _cell(svg: Element, row: Row, place: tuple[int, int], scale: tuple[float, float]) -> None:
    """A coloured box with the logarithm of its figure, and the figure as a hint."""
    low, high = scale
    level = math.log10(row.kl) if row.kl > 0 else low
    share = min(1.0, max(0.0, (level - low) / (high - low))) if high > low else 1.0
    mixed = [round(a + share * (b - a)) for a, b in zip(LOW, HIGH, strict=True)]
    x, y = place
    box = _box(svg, x + 1, y + 1, (CELL - 2, ROW - 2), "#" + "".join(f"{c:02x}" for c in mixed))
    hint = f"{printable(row.name)} {row.scheme}: {words.kl(row.kl)}"
    SubElement(box, "title").text = hint
    short = f"{level:.1f}" if math.isfinite(level) else "∞"
    color = PAPER if share > 0.5 else INK
    middle = (x + CELL / 2, y + ROW / 2 + 4)
    _text(svg, *middle, short, middle=True, attrib={"fill": color, "font-size": "10.5"})


def _box(svg: Element, x: float, y: float, size: tuple[float, float], fill: str) -> Element:
    width, height = map(str, size)
    return SubElement(svg, "rect", x=str(x), y=str(y), width=width, height=height, fill=fill)


def _text(
    svg: Element,
    x: float,
    y: float,
    text: str,
    middle: bool = False,
    attrib: dict[str, str] | None = None,
) -> None:
    found = {"fill": INK, "x": str(x), "y": str(y), **(attrib or {})}
    if middle:
        found["text-anchor"] = "middle"
    SubElement(svg, "text", attrib=found).text = text
