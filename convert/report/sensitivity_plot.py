"""Heat map of sensitivities: fused sets by layers at one precision, on a logarithmic scale."""

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from lowbit.convert.budget.sensitivities import Row, Sensitivities
from lowbit.convert.plan.sets import RANKED_BITS
from lowbit.convert.report import formatting
from lowbit.formats.architectures.names import split_layer
from lowbit.formats.charts import shapes
from lowbit.formats.printable import printable

CELL, ROW, LEFT, TOP, BOTTOM = 34, 26, 190, 66, 30
LEAST_COLUMNS = 12  # width that the title needs
LOW, HIGH = (235, 241, 250), (8, 48, 107)  # ends of the colour scale: red, green, blue
STYLE = """
text { font: 12px sans-serif; fill: #1f2933; }
.title { font-size: 14px; font-weight: bold; }
.paper { fill: #ffffff; }
.figure { font-size: 10.5px; }
.dark { fill: #ffffff; }
"""
DECADES = 4  # length of the scale, below the largest figure
HEAD = "head"


def heat_map(sensitivities: Sensitivities) -> bytes:
    """A self-contained SVG of the KL of every set at INT4, at the largest group size measured."""
    rows = _shown(sensitivities.rows)
    cells = {(split_layer(row.name).rest, _column(row)): row for row in rows}
    kinds = list(dict.fromkeys(kind for kind, _ in cells))
    layers = sorted({layer for _, layer in cells if layer != HEAD}, key=int)
    columns = [*layers, HEAD] if any(layer == HEAD for _, layer in cells) else layers
    finite = [row.kl for row in rows if math.isfinite(row.kl) and row.kl > 0] or [1.0]
    top = math.log10(max(finite))
    bottom = max(math.log10(min(finite)), top - DECADES)
    width = LEFT + CELL * max(len(columns), LEAST_COLUMNS) + 20
    height = TOP + ROW * len(kinds) + BOTTOM
    schemes = " and ".join(dict.fromkeys(str(row.scheme) for row in rows))
    title = f"Mean KL (nats a token) with one set at {schemes}"
    svg = shapes.svg_file(title, (width, height), STYLE)
    shapes.box(svg, 0, 0, (width, height), "paper")
    shapes.text(svg, 12, 22, title, "start", "title")
    shapes.text(
        svg, 12, 42, f"log10, layer by layer; on {sensitivities.text_name}", "start", "tick"
    )
    for x, column in enumerate(columns):
        shapes.text(svg, LEFT + CELL * x + CELL / 2, TOP - 6, column, "middle", "tick")
    for y, kind in enumerate(kinds):
        shapes.text(svg, 12, TOP + ROW * y + ROW / 2 + 4, kind, "start", "tick")
        for x, column in enumerate(columns):
            row = cells.get((kind, column))
            if row is not None:
                _cell(svg, row, (LEFT + CELL * x, TOP + ROW * y), (bottom, top))
    return bytes(tostring(svg, encoding="utf-8"))


def _shown(rows: Sequence[Row]) -> list[Row]:
    """Rows of RANKED_BITS bits and the largest group, one for every set."""
    found: dict[str, Row] = {}
    for row in rows:
        known = found.get(row.name)
        if row.bits == RANKED_BITS and (known is None or known.group_size < row.group_size):
            found[row.name] = row
    return list(found.values())


def _column(row: Row) -> str:
    layer = split_layer(row.name).layer
    return HEAD if layer is None else str(layer)


def _cell(svg: Element, row: Row, place: tuple[int, int], scale: tuple[float, float]) -> None:
    """Draw a coloured box with the logarithm of a figure, and the figure as a tooltip."""
    low, high = scale
    level = math.log10(row.kl) if row.kl > 0 else low
    share = min(1.0, max(0.0, (level - low) / (high - low))) if high > low else 1.0
    mixed = [round(a + share * (b - a)) for a, b in zip(LOW, HIGH, strict=True)]
    x, y = place
    cell = shapes.box(svg, x + 1, y + 1, (CELL - 2, ROW - 2), "cell")
    cell.set("fill", "#" + "".join(f"{c:02x}" for c in mixed))
    hint = f"{printable(row.name)} {row.scheme}: {formatting.kl(row.kl)}"
    SubElement(cell, "title").text = hint
    short = f"{level:.1f}" if math.isfinite(level) else "∞"
    style = "figure dark" if share > 0.5 else "figure"
    shapes.text(svg, x + CELL / 2, y + ROW / 2 + 4, short, "middle", style)
