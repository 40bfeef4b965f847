"""The plot of a sweep as one SVG file, in colours that read on light and on dark pages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowbit.formats.charts.axes import Axis, linear_axis
from lowbit.formats.charts.chart import Dot, Line, Mark, chart_file
from lowbit.formats.files.atomic import replace_file

SIZE = (640.0, 320.0)
MARGIN = 0.05  # share of the x axis on each side of the points
LEAST_GAP = 0.065  # share of the x axis between two texts side by side
STYLE = """
text { font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #808890; }
.title { font-size: 14px; font-weight: 600; }
.name { fill: #3b82f6; }
.grid { stroke: #808890; stroke-opacity: 0.25; }
.axis, .leader { stroke: #808890; }
polyline { fill: none; }
.measured { stroke: #3b82f6; stroke-width: 2; }
.point { fill: #3b82f6; }
.reference { stroke: #808890; stroke-width: 1.5; stroke-dasharray: 5 4; }
"""


@dataclass(frozen=True, slots=True)
class NamedLine:
    """A line of the plot.

    Attributes:
        name: in the legend.
        points: x, above 0, and y, at least 0, of each.
        marked: drawn with a dot at every point and its value beside it; else dashed, in grey.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    marked: bool


def line_plot(title: str, x_label: str, y_label: str, lines: Sequence[NamedLine]) -> str:
    """The SVG text of lines over one logarithmic x axis, y from 0 up.

    Args:
        title: above the plot.
        x_label: with the unit.
        y_label: with the unit.
        lines: at least one with a point; the x axis names the points of the first.
    """
    xs = [x for line in lines for x, _ in line.points]
    room = max(2.0, max(xs) / min(xs)) ** MARGIN
    low, high = min(xs) / room, max(xs) * room
    scale = Axis(x_label, low, high, (), log=True)
    named = set(_spaced(scale, [x for x, _ in lines[0].points]))
    x = Axis(x_label, low, high, tuple((value, number(value)) for value in sorted(named)), log=True)
    y = linear_axis(y_label, [y for line in lines for _, y in line.points], from_zero=True)
    marks: list[Mark] = [Line(line.points, _style(line), marked=False) for line in lines]
    marks += [
        Dot(at, value, number(value) if at in named else "", "point")
        for line in lines
        if line.marked
        for at, value in line.points
    ]
    legend = [(line.name, _style(line)) for line in lines]
    return chart_file(title, x, y, marks, legend, STYLE, SIZE)


def write_plot(path: Path, svg: str) -> None:
    """Write the plot whole or not at all.

    Raises:
        ResourceError: the place cannot be written to.
    """
    replace_file(path, svg.encode())


def number(value: float) -> str:
    """Three digits, or all digits before the point of a larger number: `0.25`, `84.1`, `2,310`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _style(line: NamedLine) -> str:
    return "measured" if line.marked else "reference"


def _spaced(axis: Axis, values: Sequence[float]) -> Iterator[float]:
    """The values whose texts do not touch, from left to right."""
    last = -LEAST_GAP
    for value in sorted(values):
        if axis.share(value) - last >= LEAST_GAP:
            last = axis.share(value)
            yield value
